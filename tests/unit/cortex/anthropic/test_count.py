"""The token count endpoint of the Messages API."""

import json
from typing import Any

import anthropic
import orjson
import pytest

from cortex.anthropic.claude_code import REQUEST
from cortex.anthropic.conversation_node import TOOLS, responds
from cortex.fake_node import FakeNode
from helexa.core.errors import ApiError
from helexa.core.wire.tokens_and_embeddings import TokenizeRequest
from helexa.cortex.anthropic.reply import Translation
from helexa.cortex.anthropic.request_settings_and_token_count import CountRequest
from helexa.cortex.forwarding.token_queries import parse_count
from helexa.cortex.routes.tokens import count_tokens

HI: Any = {"role": "user", "content": "Hi"}


def request(**fields: object) -> CountRequest:
    return CountRequest.parse(json.dumps({"model": "m", "messages": [HI], **fields}).encode())


def test_count_tokens_translates_the_prompt_like_a_messages_request() -> None:
    body = json.dumps(REQUEST).encode()
    tokenize_request, chat = json.loads(CountRequest.parse(body).body), json.loads(Translation.parse(body).body)
    for name in ("model", "messages", "tools", "chat_template_kwargs"):
        assert tokenize_request[name] == chat[name]
    TokenizeRequest.parse(CountRequest.parse(body).body)


def test_count_tokens_with_a_final_assistant_text_omits_the_generation_prompt() -> None:
    tokenize_request = json.loads(request(messages=[HI, {"role": "assistant", "content": "He"}]).body)
    assert (tokenize_request["add_generation_prompt"], tokenize_request["continue_final_message"]) == (False, True)
    assert tokenize_request["chat_template_kwargs"] == {"enable_thinking": False}


async def test_token_count_is_estimated_if_no_node_counts() -> None:
    async def no_response(body: bytes) -> None:
        return None

    async def node_response(body: bytes) -> tuple[int, bytes]:
        return 200, b'{"count": 12, "max_model_len": 9, "tokens": []}'

    count = request(messages=[{"role": "user", "content": "é" * 196}])
    assert await count_tokens(count, "Org/M", no_response) == b'{"input_tokens":100}'
    assert await count_tokens(count, "Org/M", node_response) == b'{"input_tokens":12}'


@pytest.mark.parametrize(
    "node_reply", [(500, b'{"count": 1}'), (200, b""), (200, b"[]"), (200, b'{"count": true}'), (200, b'{"count": -1}')]
)
def test_invalid_token_count_of_a_node_is_ignored(node_reply: tuple[int, bytes]) -> None:
    assert parse_count(*node_reply) is None


def test_estimated_token_count_covers_every_part_of_a_prompt() -> None:
    tool = {"name": "f", "description": "x" * 400, "input_schema": {"type": "object"}}
    image = {"type": "image", "source": {"type": "base64", "data": "x" * 9_000_000}}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "x" * 400}}
    small = request().estimate
    assert small >= 1
    assert request(system="x" * 400).estimate >= small + 100
    assert request(tools=[tool]).estimate > small + 100
    assert request(messages=[HI, {"role": "assistant", "content": [use]}, HI]).estimate > small + 100
    assert small < request(messages=[{"role": "user", "content": [image]}]).estimate < 5000


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"model": "m"}', b'{"model":"m","messages":"x"}'])
def test_malformed_count_tokens_request_is_400(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        CountRequest.parse(body)
    assert refused.value.status == 400
    with pytest.raises(ApiError):
        Translation.parse(body)


def test_half_of_a_surrogate_pair_in_a_request_is_replaced() -> None:
    body = rb'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"\ud83d\ude00 \ud83d \\\ud83d"}]}'
    assert orjson.loads(Translation.parse(body).body)["messages"][0]["content"] == "\U0001f600 \ufffd \\\ufffd"
    assert CountRequest.parse(body).estimate > 0


def test_deeply_nested_json_is_accepted_or_rejected_with_400() -> None:
    for depth in (10, 200, 1000, 100_000):
        nested = b"[" * depth + b"]" * depth
        for kind in (b"tool_use", b"unknown"):
            content = b'[{"type":"%b","id":"1","name":"f","input":{"a":%b}}]' % (kind, nested)
            body = b'{"model":"m","max_tokens":1,"messages":[{"role":"assistant","content":%b}]}' % content
            try:
                Translation.parse(body)
            except ApiError as error:
                assert error.status == 400 and depth > 100
            else:
                assert depth < 1000


async def test_count_tokens_and_messages_fail_alike_for_a_prompt_rejected_by_the_node(
    node: FakeNode, client: anthropic.AsyncAnthropic
) -> None:
    error = {"type": "invalid_request_error", "code": "template_render_failed", "message": "no turn", "param": None}
    node.speak = responds({"error": error}, 422)
    with pytest.raises(anthropic.UnprocessableEntityError) as refused:
        await client.messages.create(model="small", max_tokens=9, messages=[HI])
    with pytest.raises(anthropic.UnprocessableEntityError) as not_counted:
        await client.messages.count_tokens(model="small", messages=[HI])
    errors: list[Any] = [not_counted.value.body, refused.value.body]
    assert errors[0]["error"] == errors[1]["error"]


async def test_count_tokens_omits_tools_if_tool_choice_is_none(
    node: FakeNode, client: anthropic.AsyncAnthropic
) -> None:
    node.speak = responds({"count": 1, "max_model_len": 4096, "tokens": [0]})
    await client.messages.count_tokens(model="small", messages=[HI], tools=TOOLS, tool_choice={"type": "none"})
    await client.messages.count_tokens(model="small", messages=[HI], tools=TOOLS, tool_choice={"type": "any"})
    assert ["tools" in json.loads(body) for body in node.bodies] == [False, True]
