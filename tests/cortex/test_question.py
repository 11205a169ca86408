"""Reading bodies that anybody may send, and naming another model in them."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helexa.core.errors import ApiError
from helexa.core.fleet import Limit
from helexa.cortex.question import Question, parse_question

PATH = "/v1/chat/completions"
LIMIT = Limit(context=1000, input=700, output=50)
NAMES = st.text(min_size=1, max_size=20) | st.sampled_from(
    ["model", '"', "\\", "Org/M", "é", "\x7f\u2028", "😀", '"model"']
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
TREES = st.recursive(
    SCALARS | NAMES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
MEMBERS = st.lists(st.tuples(NAMES, TREES), max_size=4)
BLANKS = st.sampled_from(["", " ", "\n\t", "\r\n "])


def members(pairs: list[tuple[str, Any]], gaps: list[str], ascii: bool) -> bytes:
    """A JSON object with exactly these members, in this order, some of them twice perhaps."""
    blank, around = gaps
    coded = [
        f"{blank}{json.dumps(name, ensure_ascii=ascii)}{around}:{blank}{json.dumps(value, ensure_ascii=ascii)}{around}"
        for name, value in pairs
    ]
    return f"{around}{{{','.join(coded)}}}{blank}".encode("utf-8", "surrogatepass")


def asked(body: bytes) -> Question | None:
    """The question in a body; None for a refusal, in which everything is in order."""
    try:
        return parse_question(PATH, [], body)
    except ApiError as error:
        codes = {400: {"malformed_json", "missing_model_field"}, 422: {"invalid_request_body"}}
        assert error.code in codes[error.status]
        json.dumps(error.envelope()).encode()
        return None


@given(
    before=MEMBERS,
    model=NAMES,
    after=MEMBERS,
    other=NAMES,
    gaps=st.lists(BLANKS, min_size=2, max_size=2),
    ascii=st.booleans(),
)
@example([("model", "a")], "a", [], "b", ["", ""], True)
@example([], "a", [("model", "b")], "a", ["", ""], True)
@example([("x", {"model": "a"})], "a", [("y", '"model":"a"')], "b", ["", " "], True)
@example([("x", '"model":"a"')], "é", [], "b", ["", ""], False)
@example([("model", 1)], "\\", [("mod", '{"model":"\\')], '"', ["", ""], True)
def test_only_the_name_is_replaced(
    before: list[tuple[str, Any]],
    model: str,
    after: list[tuple[str, Any]],
    other: str,
    gaps: list[str],
    ascii: bool,
) -> None:
    body = members([*before, ("model", model), *after], gaps, ascii)
    question = asked(body)
    last = json.loads(body)["model"]
    if question is None:
        assert not isinstance(last, str) or not last
        return
    assert question.model == last
    assert question.body_for(question.model) is body
    renamed = question.body_for(other)
    assert json.loads(renamed) == {**json.loads(body), "model": other}
    again = asked(renamed)
    assert again is not None
    assert (again.model, again.stream, again.max_output) == (other, question.stream, question.max_output)


@given(st.binary(max_size=200))
@example(b"\xff")
@example(b'{"model":"\xff"}')
@example(b'{"model":"\xed\xa0\x80"}')
@example(b'{"model":"\\ud800"}')
@example(b'{"model":"a","x":"\\ud800"}')
@example(b'{"model":"a","x":1e999}')
@example(b'{"model":"a","x":NaN}')
@example(b'{"model":"a",}')
@example(b'{"model":"a"}{}')
@example(b'\xef\xbb\xbf{"model":"a"}')
@example(b"[" * 100_000)
@example(b'{"model":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
@example(b'{"model":"a","x":' + b'{"x":' * 2000 + b"1" + b"}" * 2000 + b"}")
@example(b'{"model":"a","max_tokens":' + b"9" * 5000 + b"}")
@example(b'{"model":"a\\u0000"}')
@example(b"\x00")
@example(b"")
def test_no_body_is_a_fault(body: bytes) -> None:
    question = asked(body)
    if question is not None:
        named = question.body_for("Org/M")
        assert parse_question(PATH, [], named).model == "Org/M"


@given(TREES)
def test_any_json_is_read_or_refused(value: Any) -> None:
    asked(json.dumps(value).encode())


@given(st.dictionaries(st.sampled_from(["max_tokens", "max_completion_tokens", "max_output_tokens"]), TREES))
def test_limits_are_numbers_above_zero(limits: dict[str, Any]) -> None:
    question = asked(json.dumps({"model": "a", **limits}).encode())
    assert question is not None
    assert question.max_output is None or question.max_output > 0
    assert question.tokens(None) > 0


def held(limit: Limit | None = LIMIT, path: str = PATH, **fields: Any) -> int:
    """Tokens that a budget must hold, beside those of the body."""
    question = parse_question(path, [], json.dumps({"model": "a", **fields}).encode())
    return question.tokens(limit) - question.prompt_estimate


def test_every_answer_may_be_as_long_as_one() -> None:
    assert held(max_tokens=10, n=3) == 30
    assert held(n=3) == 3 * 50
    assert held(None, n=2) == 2 * held(None)
    assert held(max_tokens=10, n=1 << 70) == 10 * 128
    for odd in (None, 0, -3, True, "3", 2.5, [3]):
        assert held(max_tokens=10, n=odd) == 10
    assert held(path="/v1/embeddings", n=3) == 0


def test_who_goes_on_from_a_response_may_fill_the_context() -> None:
    asked: dict[str, Any] = {"path": "/v1/responses", "input": "x", "max_output_tokens": 10}
    small = len(json.dumps({"model": "a", **asked, "previous_response_id": "resp_1"})) // 4
    assert held(**asked) == held(**asked, previous_response_id=None) == 10
    assert 710 - small <= held(**asked, previous_response_id="resp_1") <= 710
    assert 1010 - small <= held(Limit(context=1000), **asked, previous_response_id="resp_1") <= 1010
    assert held(None, **asked, previous_response_id="resp_1") == 10
    assert held(**asked, padding="x" * 4000, previous_response_id="resp_1") == 10  # which is more already


@pytest.mark.parametrize("body", [b'{"model":"a"}', b'{"stream":true,"max_tokens":5,"model":"a"}'])
def test_the_clients_own_bytes_stay(body: bytes) -> None:
    question = parse_question(PATH, [], body)
    assert question.body_for("Org/M") == body.replace(b'"a"', b'"Org/M"')


@pytest.mark.parametrize("value", [b"1e999", b"[" * 500 + b"]" * 500])
def test_what_cannot_be_written_anew_is_refused(value: bytes) -> None:
    question = parse_question(PATH, [], b'{"m\\u006fdel":"a","x":%s}' % value)
    assert question.body_for("a") is question.body
    with pytest.raises(ApiError) as caught:
        question.body_for("Org/M")
    assert (caught.value.status, caught.value.code) == (400, "malformed_json")
