"""Anthropic's own client, through a real gateway, to a scripted node."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from aiohttp import web

from cortex.anthropic import sdk
from cortex.anthropic.claude_code import BASH, READ, REQUEST
from cortex.anthropic.openai_stream import (
    DONE,
    KEEP_ALIVE,
    calls,
    delta,
    event,
    finish,
    piece,
    said,
    thought,
    usage,
)
from cortex.fake_node import FakeNode, Speak, begin, die_within_an_event, die_within_json, refuse
from cortex.running import Cortex, eventually, running_cortex
from helexa.cortex import proxy

HI: list[Any] = [{"role": "user", "content": "Hi"}]
ASK: dict[str, Any] = {"model": "small", "max_tokens": 64, "messages": HI}
TOOLS: list[Any] = [BASH, READ]
CACHED = {"prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": {"reasoning_tokens": 2}}
STREAM = [
    delta(role="assistant", content=""),
    KEEP_ALIVE,
    thought("They "),
    thought("greet."),
    said("Hel"),
    said("lo é"),
    calls(piece(0, "", name="Bash", id="call_1")),
    calls(piece(0, '{"command":')),
    calls(piece(1, '{"file_path": "/a"}', name="Read", id="call_2")),
    calls(piece(0, ' "ls"}')),
    finish("tool_calls"),
    usage(7, 9, **CACHED),
    DONE,
]
CONTENT = [
    {"type": "thinking", "thinking": "They greet.", "signature": ""},
    {"type": "text", "text": "Hello é"},
    {"type": "tool_use", "id": "call_1", "name": "Bash", "input": {"command": "ls"}},
    {"type": "tool_use", "id": "call_2", "name": "Read", "input": {"file_path": "/a"}},
]
USAGE = {
    "input_tokens": 4,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 3,
    "output_tokens": 9,
    "output_tokens_details": {"thinking_tokens": 2},
}
WHOLE: dict[str, Any] = {
    "id": "c1",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": "Hello é",
                "reasoning_content": "They greet.",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "Bash", "arguments": '{"command": "ls"}'},
                    },
                    {
                        "id": "call_2",
                        "type": "function",
                        "function": {"name": "Read", "arguments": {"file_path": "/a"}},
                    },
                ],
            },
        }
    ],
    "usage": {"prompt_tokens": 7, "completion_tokens": 9, **CACHED},
}


@asynccontextmanager
async def talking(cortex: Cortex, secret: str = "any") -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The official client, which must see every failure and so never retries."""
    options: dict[str, Any] = {"base_url": cortex.url, "api_key": secret, "max_retries": 0}
    http = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    async with anthropic.AsyncAnthropic(http_client=http, **options) as client:
        yield client


@pytest.fixture
async def client(cortex: Cortex) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with talking(cortex) as client:
        yield client


def error_type(error: anthropic.APIStatusError) -> str:
    body: Any = error.body
    assert body["type"] == "error"
    return body["error"]["type"]


def says(*chunks: bytes) -> Speak:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return await begin(request, *chunks)

    return speak


def replies(body: Any, status: int = 200, **headers: str) -> Speak:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(text=text, status=status, content_type="application/json", headers=headers)

    return speak


async def test_a_whole_message(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    node.speak = replies(WHOLE)
    message = await client.messages.create(**ASK, tools=TOOLS)
    assert [block.to_dict() for block in message.content] == CONTENT
    assert (message.model, message.stop_reason, message.role) == ("small", "tool_use", "assistant")
    assert message.usage.to_dict() == USAGE
    assert message.id.startswith("msg_")
    assert message._request_id
    asked = json.loads(node.bodies[0])
    assert (asked["model"], asked["messages"], asked["max_tokens"]) == ("Org/M", HI, 64)
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["Bash", "Read"]


async def test_a_streamed_message(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    node.speak = says(*STREAM)
    async with client.messages.stream(**ASK, tools=TOOLS) as stream:
        events = [event async for event in stream]
        message = await stream.get_final_message()
    assert [block.to_dict() for block in message.content] == CONTENT
    assert (message.model, message.stop_reason) == ("small", "tool_use")
    assert message.usage.to_dict() == USAGE
    assert [event.text for event in events if event.type == "text"] == ["Hel", "lo é"]
    assert [event.thinking for event in events if event.type == "thinking"] == ["They ", "greet."]
    assert json.loads(node.bodies[0])["stream_options"] == {"include_usage": True}


async def test_raw_events(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    node.speak = says(*STREAM)
    events = [event.type async for event in await client.messages.create(**ASK, stream=True)]
    assert events[0] == "message_start" and events[-2:] == ["message_delta", "message_stop"]
    assert events.count("content_block_start") == events.count("content_block_stop") == 4


async def test_the_bytes_are_pings_and_events_in_order(node: FakeNode, cortex: Cortex) -> None:
    node.speak = says(*STREAM)
    async with cortex.client.post(f"{cortex.url}/v1/messages", json=ASK | {"stream": True}) as response:
        assert response.content_type == "text/event-stream"
        assert "content-length" not in response.headers
        assert response.headers["request-id"] == response.headers["x-request-id"]
        raw = await response.read()
    sdk.check_order(sdk.parsed(raw))
    assert raw.count(b"event: ping\n") == 2


async def test_a_turn_with_images_and_results_reaches_the_node(
    node: FakeNode, client: anthropic.AsyncAnthropic
) -> None:
    node.speak = replies(WHOLE)
    pixel: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": "R0lGOD"}}
    first = await client.messages.create(**ASK)
    turns = [
        *HI,
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "a.txt"},
                {"type": "tool_result", "tool_use_id": "call_2", "content": [pixel]},
                {"type": "text", "text": "What is it?"},
            ],
        },
    ]
    await client.messages.create(**ASK | {"messages": turns}, tools=TOOLS, stop_sequences=["END"])
    asked = json.loads(node.bodies[-1])
    _, assistant, listing, picture, question = asked["messages"]
    assert assistant["reasoning_content"] == "They greet."
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [
        {"command": "ls"},
        {"file_path": "/a"},
    ]
    assert listing == {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"}
    assert picture["content"][0]["image_url"]["url"] == "data:image/gif;base64,R0lGOD"
    assert question == {"role": "user", "content": "What is it?"}
    assert asked["stop"] == ["END"]


async def test_a_stop_sequence_is_named(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    asked = ASK | {"stop_sequences": ["END"]}
    node.speak = replies({"choices": [{"message": {"content": "x"}, "finish_reason": "stop", "stop_reason": "END"}]})
    message = await client.messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    node.speak = says(said("x"), finish("stop", stop_reason="END"), DONE)
    async with client.messages.stream(**asked) as stream:
        message = await stream.get_final_message()
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


async def test_a_request_of_claude_code_is_served(node: FakeNode, cortex: Cortex) -> None:
    node.speak = says(*STREAM)
    url = f"{cortex.url}/v1/messages?beta=true"
    async with cortex.client.post(url, json=REQUEST, headers={"anthropic-version": "2023-06-01"}) as response:
        assert response.status == 200
        message = sdk.message(await response.read())
    assert [block.to_dict() for block in message.content] == CONTENT
    assert [turn["role"] for turn in json.loads(node.bodies[0])["messages"]].count("system") == 1


# Failures


async def test_a_refusal_of_the_node_keeps_its_sense(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    node.speak = refuse
    for stream in (False, True):
        with pytest.raises(anthropic.APIStatusError) as refused:
            await client.messages.create(**ASK, stream=stream)
        assert refused.value.status_code == 503
        body: Any = refused.value.body
        assert body["error"] == {"type": "overloaded_error", "message": "queue full"}
        assert refused.value.response.headers["retry-after"] == "7"
        assert body["request_id"] == refused.value.request_id is not None


TOO_LONG = {
    "message": "This model's maximum context length is 100 tokens. However, your messages resulted in 120 tokens.",
    "type": "invalid_request_error",
    "code": "context_length_exceeded",
    "param": "messages",
    "prompt_len": 120,
    "max": 100,
}


async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_know(
    node: FakeNode, client: anthropic.AsyncAnthropic
) -> None:
    node.speak = replies({"error": TOO_LONG}, 400)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 120 tokens > 100 maximum"):
        await client.messages.create(**ASK)


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "Org/Nobody"}, 404, "not_found_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_request_error"),
    ],
)
async def test_what_the_gateway_refuses(
    client: anthropic.AsyncAnthropic, fields: dict[str, Any], status: int, kind: str
) -> None:
    with pytest.raises(anthropic.APIStatusError) as refused:
        await client.messages.create(**ASK | fields)
    assert (refused.value.status_code, error_type(refused.value)) == (status, kind)


@pytest.mark.parametrize(
    "speak",
    [
        die_within_an_event,
        says(said("a")),
        says(said("a"), b"data: {oops\n\n", DONE),
        says(said("a"), event({"error": {"message": "m", "type": "api_error", "code": None, "param": None}}), DONE),
    ],
    ids=["dies", "ends early", "garbage", "error"],
)
async def test_a_stream_that_fails_ends_in_an_error(
    node: FakeNode, cortex: Cortex, client: anthropic.AsyncAnthropic, speak: Speak
) -> None:
    node.speak = speak
    heard: list[str] = []
    with pytest.raises(anthropic.APIStatusError):
        async with client.messages.stream(**ASK) as stream:
            async for text in stream.text_stream:
                heard.append(text)  # noqa: PERF401
    assert heard == ["a"]
    async with cortex.client.post(f"{cortex.url}/v1/messages", json=ASK | {"stream": True}) as response:
        assert sdk.failure(await response.read())["type"] == "api_error"
    await eventually(lambda: node.speaking == 0)


@pytest.mark.parametrize(
    "speak", [die_within_json, replies("[]"), replies("oops"), replies({"choices": []}), says(DONE)]
)
async def test_an_answer_that_is_none_is_an_error(
    node: FakeNode, client: anthropic.AsyncAnthropic, speak: Speak
) -> None:
    node.speak = speak
    with pytest.raises(anthropic.APIStatusError) as failed:
        await client.messages.create(**ASK)
    assert (failed.value.status_code, error_type(failed.value)) == (502, "api_error")


async def test_no_text_of_a_stranger_is_passed_on(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    for body in ("at /srv/secret.py:7", {"error": {"message": "at /srv/secret.py:7", "code": 500}}, {"detail": "/srv"}):
        node.speak = replies(body, 500)
        with pytest.raises(anthropic.InternalServerError, match="upstream returned 500") as failed:
            await client.messages.create(**ASK)
        assert "srv" not in str(failed.value.body)


async def test_who_hangs_up_ends_the_work(node: FakeNode, cortex: Cortex, client: anthropic.AsyncAnthropic) -> None:
    async def never_end(node: FakeNode, request: web.Request) -> web.StreamResponse:
        response = await begin(request, said("a"))
        await node.go_on.wait()
        return response

    node.speak = never_end
    async with client.messages.stream(**ASK) as stream:
        assert await anext(aiter(stream.text_stream)) == "a"
    await eventually(lambda: node.speaking == 0)


@pytest.fixture
async def cold(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cortex]:
    """A gateway that has to load `Org/Cold` first, and says so at once."""
    monkeypatch.setattr(proxy, "KEEP_ALIVE_AFTER_SECS", 0.01)
    monkeypatch.setattr(proxy, "KEEP_ALIVE_SECS", 0.01)
    async with running_cortex(node, models=[{"id": "Org/Cold"}]) as cortex:
        yield cortex


@pytest.mark.parametrize("refusal", [None, (500, "boom")])
async def test_who_waits_for_a_load_hears_pings(node: FakeNode, cold: Cortex, refusal: Any) -> None:
    node.speak, node.load_refusal = says(*STREAM), refusal
    node.may_load.clear()
    ask = ASK | {"model": "Org/Cold", "stream": True}
    async with cold.client.post(f"{cold.url}/v1/messages", json=ask) as response:
        heard = b""
        while heard.count(b"event: ping") < 3:
            heard += await response.content.readany()
        node.may_load.set()
        heard += await response.read()
    if refusal is None:
        assert [block.to_dict() for block in sdk.message(heard).content] == CONTENT
    else:
        assert "could not be loaded" in sdk.failure(heard)["message"]


async def test_keys_and_budgets_hold_as_they_do_elsewhere(node: FakeNode) -> None:
    key = {"key": "alice's", "account_id": "alice", "hard_cap": 200}
    settings = {"entitlements": {"require_auth": True, "keys": [key]}}
    async with running_cortex(node, settings=settings, aliases={"small": "Org/M"}) as cortex:
        async with talking(cortex, "bob's") as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(**ASK)
            assert error_type(refused.value) == "authentication_error"
        async with talking(cortex, "alice's") as client:
            node.speak = replies(WHOLE)
            await client.messages.create(**ASK)  # 16 tokens, though more than 100 had to be free for it
            node.speak = says(*STREAM)
            async with client.messages.stream(**ASK) as stream:
                await stream.until_done()
            with pytest.raises(anthropic.RateLimitError) as refused:
                await client.messages.create(**ASK | {"max_tokens": 200})
            assert error_type(refused.value) == "rate_limit_error"
            assert refused.value.response.headers["x-should-retry"] == "false"
    assert len(node.bodies) == 2


# Counting


async def test_a_node_counts(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    node.speak = replies({"count": 123, "max_model_len": 4096, "tokens": list(range(123))})
    count = await client.messages.count_tokens(model="small", messages=HI, tools=TOOLS, system="s")
    assert count.input_tokens == 123
    asked = json.loads(node.bodies[0])
    assert asked["model"] == "Org/M"
    assert asked["messages"] == [{"role": "system", "content": "s"}, *HI]
    assert asked["add_generation_prompt"] is True
    assert len(asked["tools"]) == 2


async def test_where_nobody_counts_the_count_is_guessed(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    messages: Any = [{"role": "user", "content": "x" * 392}]
    for speak in (replies("{}", 404), replies("oops"), replies({"count": "many"}), die_within_json):
        node.speak = speak
        assert (await client.messages.count_tokens(model="small", messages=messages)).input_tokens == 100


async def test_counting_is_refused_in_the_same_words(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.role"):
        await client.messages.count_tokens(model="small", messages=[{"role": "robot", "content": "x"}])  # type: ignore[typeddict-item]
