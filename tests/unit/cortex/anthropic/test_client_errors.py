"""Failures as Anthropic's client sees them."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from aiohttp import web

from cortex.anthropic import sse_events
from cortex.anthropic.conversation_node import ASK, COMPLETION, CONTENT, STREAM, error_type, responds, streams, talking
from cortex.anthropic.openai_stream import (
    DONE,
    event,
    text_chunk,
)
from cortex.fake_node import FakeNode, Speak, begin, die_within_an_event, die_within_json, refuse
from cortex.running_gateway import Cortex, eventually, running_cortex
from helexa.cortex.forwarding import relay_and_keep_alive


async def test_node_error_reaches_the_client_with_its_status_and_retry_after(
    node: FakeNode, client: anthropic.AsyncAnthropic
) -> None:
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


async def test_overlong_prompt_error_has_the_wording_that_agents_parse(
    node: FakeNode, client: anthropic.AsyncAnthropic
) -> None:
    node.speak = responds({"error": TOO_LONG}, 400)
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
async def test_invalid_messages_request_gets_an_anthropic_error_with_its_status_and_type(
    client: anthropic.AsyncAnthropic, fields: dict[str, Any], status: int, kind: str
) -> None:
    with pytest.raises(anthropic.APIStatusError) as refused:
        await client.messages.create(**ASK | fields)
    assert (refused.value.status_code, error_type(refused.value)) == (status, kind)


@pytest.mark.parametrize(
    "speak",
    [
        die_within_an_event,
        streams(text_chunk("a")),
        streams(text_chunk("a"), b"data: {oops\n\n", DONE),
        streams(
            text_chunk("a"), event({"error": {"message": "m", "type": "api_error", "code": None, "param": None}}), DONE
        ),
    ],
    ids=["dies", "ends early", "garbage", "error"],
)
async def test_failed_messages_stream_ends_with_an_error_event(
    node: FakeNode, cortex: Cortex, client: anthropic.AsyncAnthropic, speak: Speak
) -> None:
    node.speak = speak
    received: list[str] = []
    with pytest.raises(anthropic.APIStatusError):
        async with client.messages.stream(**ASK) as stream:
            async for text in stream.text_stream:
                received.append(text)  # noqa: PERF401
    assert received == ["a"]
    async with cortex.client.post(f"{cortex.url}/v1/messages", json=ASK | {"stream": True}) as response:
        assert sse_events.failure(await response.read())["type"] == "api_error"
    await eventually(lambda: node.speaking == 0)


@pytest.mark.parametrize(
    "speak", [die_within_json, responds("[]"), responds("oops"), responds({"choices": []}), streams(DONE)]
)
async def test_invalid_response_of_a_node_is_502(
    node: FakeNode, client: anthropic.AsyncAnthropic, speak: Speak
) -> None:
    node.speak = speak
    with pytest.raises(anthropic.APIStatusError) as failed:
        await client.messages.create(**ASK)
    assert (failed.value.status_code, error_type(failed.value)) == (502, "api_error")


async def test_error_body_of_an_unknown_format_is_not_forwarded_to_the_client(
    node: FakeNode, client: anthropic.AsyncAnthropic
) -> None:
    for body in ("at /srv/secret.py:7", ["/srv"], {"trace": "/srv"}):
        node.speak = responds(body, 500)
        with pytest.raises(anthropic.InternalServerError, match="upstream returned 500") as failed:
            await client.messages.create(**ASK)
        assert "srv" not in str(failed.value.body)


async def test_disconnect_of_the_client_cancels_the_request_at_the_node(
    node: FakeNode, cortex: Cortex, client: anthropic.AsyncAnthropic
) -> None:
    async def never_end(node: FakeNode, request: web.Request) -> web.StreamResponse:
        response = await begin(request, text_chunk("a"))
        await node.go_on.wait()
        return response

    node.speak = never_end
    async with client.messages.stream(**ASK) as stream:
        assert await anext(aiter(stream.text_stream)) == "a"
    await eventually(lambda: node.speaking == 0)


@pytest.fixture
async def cold(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cortex]:
    """A gateway that must load `Org/Cold` first and sends pings at once."""
    monkeypatch.setattr(relay_and_keep_alive, "KEEP_ALIVE_AFTER_SECS", 0.01)
    monkeypatch.setattr(relay_and_keep_alive, "KEEP_ALIVE_SECS", 0.01)
    async with running_cortex(node, models=[{"id": "Org/Cold"}]) as cortex:
        yield cortex


@pytest.mark.parametrize("rejection", [None, (500, "boom")])
async def test_client_gets_pings_while_its_model_is_loaded(node: FakeNode, cold: Cortex, rejection: Any) -> None:
    node.speak, node.load_error = streams(*STREAM), rejection
    node.may_load.clear()
    ask = ASK | {"model": "Org/Cold", "stream": True}
    async with cold.client.post(f"{cold.url}/v1/messages", json=ask) as response:
        received = b""
        while received.count(b"event: ping") < 3:
            received += await response.content.readany()
        node.may_load.set()
        received += await response.read()
    if rejection is None:
        assert [block.to_dict() for block in sse_events.message(received).content] == CONTENT
    else:
        assert "could not be loaded" in sse_events.failure(received)["message"]


async def test_api_keys_and_budgets_apply_to_anthropic_messages(node: FakeNode) -> None:
    key = {"key": "alice's", "account_id": "alice", "hard_cap": 2000}
    settings = {"entitlements": {"require_auth": True, "keys": [key]}}
    async with running_cortex(node, settings=settings, aliases={"small": "Org/M"}) as cortex:
        async with talking(cortex, "bob's") as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(**ASK)
            assert error_type(refused.value) == "authentication_error"
        async with talking(cortex, "alice's") as client:
            node.speak = responds(COMPLETION)
            await client.messages.create(**ASK)  # costs 16 tokens; the reservation was larger
            node.speak = streams(*STREAM)
            async with client.messages.stream(**ASK) as stream:
                await stream.until_done()
            with pytest.raises(anthropic.RateLimitError) as refused:
                await client.messages.create(**ASK | {"max_tokens": 2000})
            assert error_type(refused.value) == "rate_limit_error"
            assert refused.value.response.headers["x-should-retry"] == "false"
    assert len(node.bodies) == 2
