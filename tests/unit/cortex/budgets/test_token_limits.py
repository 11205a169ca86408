"""The most tokens that a request can use, and the forwarded body that enforces this limit."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from helexa.core.errors import ApiError
from helexa.core.node_reports import Limit
from helexa.cortex.forwarding.request import ClientRequest, parse_request
from helexa.cortex.forwarding.token_bounds import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    IMAGE_TOKENS,
    IMAGES,
    PROMPT_OVERHEAD,
    RESPONSES,
    UNKNOWN_CONTEXT,
    media_tokens,
)

LIMIT = Limit(context=1000, input=700, output=50)
BIG = 1 << 40


def ask(path: str = CHAT, **fields: Any) -> ClientRequest:
    return parse_request(path, [], json.dumps({"model": "a", **fields}).encode())


def output_of(path: str, output: int = 10, **fields: Any) -> int:
    """Return the most output tokens of all choices. `output` is the limit per choice if the request has none."""
    spending = ask(path, **fields).spending
    return spending.most_tokens(output if spending.output is None else spending.output, None) - spending.prompt


@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        (CHAT, {}, 10),
        (CHAT, {"max_tokens": 7, "n": 3}, 21),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 5, "n": None}, 5),
        (CHAT, {"max_completion_tokens": 1, "max_tokens": 100_000}, 1),
        (CHAT, {"max_output_tokens": 1}, 10),
        (CHAT, {"max_tokens": -1}, 10),
        (CHAT, {"max_completion_tokens": -1, "max_tokens": 7}, 7),
        (COMPLETIONS, {"max_tokens": -1, "prompt": "x"}, 10),
        (CHAT, {"max_tokens": 7, "best_of": 9, "prompt": ["a", "b"]}, 7),
        (COMPLETIONS, {"max_output_tokens": 1, "prompt": "x"}, 10),
        (COMPLETIONS, {"max_tokens": 7, "prompt": "a, b"}, 7),
        (COMPLETIONS, {"max_tokens": 7, "prompt": [1, 2, 3]}, 7),
        (COMPLETIONS, {"max_tokens": 7, "prompt": []}, 7),
        (COMPLETIONS, {"max_tokens": 7, "prompt": ["a, b", "c"], "n": 2}, 28),
        (COMPLETIONS, {"max_tokens": 7, "prompt": [[1, 2], [3]], "n": 2, "best_of": 3}, 42),
        (COMPLETIONS, {"max_tokens": 0, "prompt": ["a", "b"], "echo": True}, 0),
        (RESPONSES, {"max_output_tokens": 7, "max_tokens": 1, "n": 5}, 7),
        (EMBEDDINGS, {"input": ["a", "b"], "n": 3, "max_tokens": 7}, 0),
        (IMAGES, {"prompt": "x", "n": 2}, 2 * 8192),
    ],
)
def test_reserved_output_tokens_follow_the_limit_fields_of_each_api(
    path: str, fields: dict[str, Any], tokens: int
) -> None:
    assert output_of(path, **fields) == tokens


@pytest.mark.parametrize("value", [10.0, "10", True, False, 0, -1, [3], {}, 1e999])
@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT, "n"),
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (COMPLETIONS, "n"),
        (COMPLETIONS, "best_of"),
        (COMPLETIONS, "max_tokens"),
        (RESPONSES, "max_output_tokens"),
        (IMAGES, "n"),
    ],
)
def test_error_for_a_token_limit_of_wrong_type_or_sign_names_the_field(path: str, name: str, value: Any) -> None:
    if (path, name, value) == (COMPLETIONS, "max_tokens", 0) and value is not False:
        return  # valid: the prompt is only scored
    value = -2 if value == -1 and name in ("max_tokens", "max_completion_tokens") else value  # -1 is no limit
    with pytest.raises(ApiError) as caught:
        ask(path, **{name: value})
    expected = (400, None if value == 1e999 else name)  # infinity is not JSON
    assert (caught.value.status, caught.value.param) == expected


def test_request_for_too_many_choices_is_rejected() -> None:
    assert output_of(CHAT, n=128) == 1280
    with pytest.raises(ApiError, match="n: must be at least 1 and at most 128"):
        ask(n=129)


def test_context_limit_of_the_model_bounds_the_reservation() -> None:
    def reserved(output: int, context: int | None, **fields: Any) -> int:
        return ask(**fields).spending.most_tokens(output, context)

    text = {"messages": [{"role": "user", "content": "x" * 5000}]}
    body = len(json.dumps({"model": "a", **text}))
    assert reserved(100, None, **text) == body + PROMPT_OVERHEAD + 100
    assert reserved(100, 1 << 20, **text) == body + PROMPT_OVERHEAD + 100
    assert reserved(100, 1000, **text) == reserved(BIG, 1000, **text) == 1000
    assert reserved(100, 1000, n=4, **text) == 900 + 400
    assert reserved(BIG, 1000, n=4, **text) == 4000
    spending = ask(EMBEDDINGS, input=["x" * 5000, "y"]).spending
    assert spending.most_tokens(0, 512) == 1024


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS, IMAGES])
def test_images_do_not_increase_the_reservation_of_a_prompt_that_fills_the_context(path: str) -> None:
    fields = {"input": ["x" * 3000] * 2} if path == EMBEDDINGS else {"prompt": "x" * 3000}
    spending = ask(path, **fields).spending
    with_image = replace(spending, prompt=spending.prompt + IMAGE_TOKENS)
    for context in (None, 2000, 1 << 20):
        same = spending.most_tokens(7, context) == with_image.most_tokens(7, context)
        assert spending.fills(context) == same == (context == 2000 and path != IMAGES)


def test_reserved_image_tokens_do_not_depend_on_the_url() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with_image, without = ask(messages=[{"content": [image]}]), ask(messages=[{"content": []}])
    assert media_tokens(with_image.body) - media_tokens(without.body) == IMAGE_TOKENS


@pytest.mark.parametrize(
    ("parts", "count"),
    [
        (b'{"type":"image_url","image_url":{"url":"u"}}', 1),
        (b'{"type":"input_image","image_url":"u"},{"type": "input_file","file_url":"u"}', 2),
        (b'{"\\u0074ype":"\\u0069mage_url","image_\\u0075rl":{"url":"u"}}', 1),
        (b'{"type":"image\\u005Furl","image\\u005furl":{"url":"u"}}', 1),
        (b'{"image_url":{"url":"u"}},{"image_url" :{"url":"u"}},{"video_\\u0075rl":{"url":"u"}}', 3),
        (b'{"type":"audio_url","audio_url":{"url":"u"}}', 1),
        (b'{"type":"text","text":"\\"type\\":\\"image_url\\" \\u0069 \\u00e9"}', 0),
        (b'{"type":"text","my_image_url":"u","image_url_of":"u"}', 0),
    ],
)
def test_images_in_a_request_are_counted_by_type_or_url_field(parts: bytes, count: int) -> None:
    body = b'{"model":"a","messages":[{"role":"user","content":[%s]}]}' % parts
    assert media_tokens(body) == count * IMAGE_TOKENS


def test_request_with_previous_response_id_reserves_the_whole_context() -> None:
    spending = ask(RESPONSES, input="x", max_output_tokens=10, previous_response_id="resp_1").spending
    assert spending.most_tokens(10, 1000) == 1000
    assert spending.most_tokens(10, None) == UNKNOWN_CONTEXT + 10


@pytest.mark.parametrize(
    ("item", "stored"),
    [
        ({"type": "item_reference", "id": "msg_abc_0"}, "resp_abc"),
        ({"id": "rs_abc_1"}, "resp_abc"),
        ({"type": "item_reference", "id": "odd"}, "resp_"),
        ({"type": "message", "id": "msg_abc_0", "role": "user", "content": "x"}, None),
        ({"role": "assistant", "id": "msg_abc_0", "content": "x"}, None),
        ({"type": "function_call", "id": "fc_abc_0", "call_id": "c", "name": "f", "arguments": "{}"}, None),
        ("x", "resp_"),
    ],
)
def test_request_that_references_stored_items_reserves_the_whole_context(item: Any, stored: str | None) -> None:
    """A reference is short, but the item may be long."""
    spending = ask(RESPONSES, input=[{"role": "user", "content": "x"}, item], max_output_tokens=10).spending
    assert (spending.stored, spending.continues) == (stored, stored is not None)
    assert (spending.most_tokens(10, None) > UNKNOWN_CONTEXT) == (stored is not None)


def test_item_reference_with_json_escapes_is_recognized() -> None:
    body = b'{"model":"a","max_output_tokens":10,"input":[{"type":"item_\\u0072eference","\\u0069d":"msg_abc_0"}]}'
    assert parse_request(RESPONSES, [], body).previous == "resp_abc"


def test_item_reference_beside_an_out_of_range_number_is_recognized() -> None:
    hidden = b'{"role":"user","content":"x","id":1e999},{"type":"item_reference","id":"msg_abc_0"}'
    body = b'{"model":"a","max_output_tokens":10,"input":[%b]}' % hidden
    assert parse_request(RESPONSES, [], body).spending.continues


def test_rate_limits_use_an_estimate_of_the_tokens_of_a_request() -> None:
    def estimate(limit: Limit | None, path: str = CHAT, **fields: Any) -> int:
        request = ask(path, **fields)
        return request.tokens(limit) - request.prompt_estimate

    assert estimate(LIMIT, max_tokens=10, n=3) == 30
    assert parse_request(COMPLETIONS, [], b'{"model":"a","prompt":"","max_tokens":0}').tokens(LIMIT) < 30
    assert estimate(LIMIT, n=3) == 3 * 50
    assert estimate(None) == 4096
    assert estimate(LIMIT, EMBEDDINGS, input="x") == 0
    assert 650 < estimate(LIMIT, RESPONSES, input="x", max_output_tokens=10, previous_response_id="r") <= 710


def enforced(request: ClientRequest, output: int, kind: str) -> Any:
    return json.loads(replace(request, enforced=output, metered=True).body_for("Org/M", kind))


def test_reserved_output_limit_is_added_to_a_body_without_an_output_limit() -> None:
    body = b'{"max_tokens": 7,  "model":"Org/M"}'
    stated = parse_request(CHAT, [], body)
    assert replace(stated, enforced=7).body_for("Org/M") == body
    assert enforced(ask(messages=[]), 9, "neuron") == {"model": "Org/M", "messages": [], "max_tokens": 9}
    assert enforced(ask(RESPONSES, input="x"), 9, "neuron") == {
        "model": "Org/M",
        "input": "x",
        "max_output_tokens": 9,
    }
    embedding = ask(EMBEDDINGS, input="x")
    assert enforced(embedding, 9, "neuron") == enforced(embedding, 9, "openai") == {"model": "Org/M", "input": "x"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_third_party_backend_does_not_get_max_tokens_of_minus_one(path: str, name: str) -> None:
    request = ask(path, prompt="x", **{name: -1})
    assert json.loads(request.body_for("Org/M", "openai")) == {"model": "Org/M", "prompt": "x"}
    assert json.loads(request.body_for("Org/M"))[name] == -1
    assert enforced(request, 9, "openai") == {"model": "Org/M", "prompt": "x", "max_tokens": 9}


def test_third_party_backend_gets_no_duplicate_fields_and_one_output_limit() -> None:
    body = (
        b'{"model":"a","max_tokens":1,"max_completion_tokens":1,"max_tokens":100000,"Max_Tokens":5,"n_predict":9,'
        b'"N":7,"max_to\\u212aens":8,"best_of":3,"temperature":1.0,"options":{"num_predict":8},"messages":[{"x":1.50}]}'
    )
    sent = replace(parse_request(CHAT, [], body), enforced=1).body_for("Org/M", "openai")
    assert sent == b'{"model":"Org/M","max_tokens":1,"temperature":1.0,"messages":[{"x":1.50}]}'
    several = ask(COMPLETIONS, prompt="x", n=2, best_of=3, stream=True, stream_options={"x": 1})
    assert enforced(several, 5, "openai") == {
        "model": "Org/M",
        "prompt": "x",
        "n": 2,
        "best_of": 3,
        "stream": True,
        "stream_options": {"x": 1, "include_usage": True},
        "max_tokens": 5,
    }
    response = ask(RESPONSES, input="x", n=5, max_tokens=9, max_output_tokens=4)
    assert enforced(response, 4, "openai") == {"model": "Org/M", "input": "x", "max_output_tokens": 4}


def test_third_party_backend_gets_no_duplicate_fields_for_a_key_without_a_budget() -> None:
    body = b'{"model":"a", "max_tokens":1,"max_tokens":2,"x":1.50,"Stream":true,"n_predict":3}'
    request = parse_request(CHAT, [], body)
    assert request.body_for("Org/M", "openai") == b'{"model":"Org/M","max_tokens":2,"x":1.50,"n_predict":3}'
    assert request.body_for("Org/M") == body.replace(b'"a"', b'"Org/M"')
