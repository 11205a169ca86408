"""Third-party backends that send nothing for long: streaming clients get keep-alives, as from helexa's nodes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import ClientResponse, web

from cortex.fake_node import COMPLETION, DONE, FINAL, RESPONSE_STREAM, ROLE, FakeNode, begin, chunk, event
from cortex.running_gateway import Cortex, eventually, running_cortex
from helexa.core.sse import KEEP_ALIVE
from helexa.cortex.forwarding import relay_and_keep_alive

STOP = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
BODY: dict[str, Any] = {
    "model": "Org/M",
    "messages": [{"role": "user", "content": "Hi"}],
    "input": "Hi",
    "max_tokens": 9,
    "stream": True,
}


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_and_keep_alive, "SILENCE_SECS", 0.02)


@asynccontextmanager
async def gateway_of(node: FakeNode, *others: FakeNode, kind: str = "openai") -> AsyncIterator[Cortex]:
    """Run a gateway in front of a node of a kind, and of other third-party backends."""
    async with AsyncExitStack() as stack:
        for backend in (node, *others):
            await stack.enter_async_context(backend.serving())
        sections = [{"name": backend.name, "endpoint": backend.url, "kind": "openai"} for backend in (node, *others)]
        sections[0]["kind"] = kind
        yield await stack.enter_async_context(running_cortex(node, *others, settings={"neurons": sections}))


def pausing(*parts: bytes | None) -> Callable[[FakeNode, web.Request], Any]:
    """Return a handler that streams `parts`. At each None it waits for the test, at the start before the head, too."""

    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        response = None
        for part in parts:
            if part is None:
                await node.go_on.wait()
                node.go_on.clear()
            else:
                response = response or await begin(request)
                await response.write(part)
        return response or web.Response(body=COMPLETION, content_type="application/json")

    return speak


async def read_until(response: ClientResponse, mark: bytes, count: int = 1) -> bytes:
    """Return the next bytes of a response, up to the `count`-th `mark`."""
    body = b""
    async with asyncio.timeout(60):
        while body.count(mark) < count:
            body += await response.content.readany()
    return body


async def test_client_gets_keep_alive_comments_while_a_third_party_backend_sends_nothing() -> None:
    node = FakeNode(speak=pausing(None, ROLE, chunk("Hel"), None, chunk("lo"), STOP, FINAL, DONE)).holds("Org/M")
    async with (
        gateway_of(node) as cortex,
        cortex.client.post(f"{cortex.url}/v1/chat/completions", json=BODY) as response,
    ):
        assert (response.status, response.content_type) == (200, "text/event-stream")
        before = await read_until(response, KEEP_ALIVE, 3)
        assert before.replace(KEEP_ALIVE, b"") == b""
        node.go_on.set()
        within = await read_until(response, b'"Hel"')
        within += await read_until(response, KEEP_ALIVE, 3)
        node.go_on.set()
        body = (within + await response.read()).replace(KEEP_ALIVE, b"")
        assert b"error" not in body and body.endswith(DONE)
        assert body.index(b'"Hel"') < body.index(b'"lo"')


async def test_keep_alive_comment_does_not_split_an_event_that_arrives_in_parts() -> None:
    parts = (b"event: response.output_text.delta\n", None, b'data: {"delta":"Hello"}\n\n', *RESPONSE_STREAM[1:])
    node = FakeNode(speak=pausing(*parts)).holds("Org/M")
    async with gateway_of(node) as cortex, cortex.client.post(f"{cortex.url}/v1/responses", json=BODY) as response:
        body = await read_until(response, b":\n", 3)
        node.go_on.set()
        body += await response.read()
    lines = [line for line in body.split(b"\n") if line != b":"]
    assert lines[:2] == [b"event: response.output_text.delta", b'data: {"delta":"Hello"}']


async def test_messages_client_gets_pings_while_a_third_party_backend_sends_nothing() -> None:
    node = FakeNode(speak=pausing(None, ROLE, chunk("Hello"), None, STOP, FINAL, DONE)).holds("Org/M")
    async with gateway_of(node) as cortex, cortex.client.post(f"{cortex.url}/v1/messages", json=BODY) as response:
        await read_until(response, b"event: ping", 3)
        node.go_on.set()
        await read_until(response, b"Hello")
        await read_until(response, b"event: ping", 3)
        node.go_on.set()
        assert (await response.read()).endswith(b'{"type":"message_stop"}\n\n')


async def test_error_after_keep_alive_comments_is_an_event_of_the_stream() -> None:
    async def fail(node: FakeNode, request: web.Request) -> web.StreamResponse:
        await node.go_on.wait()
        return web.json_response({"error": "out of memory"}, status=500)

    node = FakeNode(speak=fail).holds("Org/M")
    async with (
        gateway_of(node) as cortex,
        cortex.client.post(f"{cortex.url}/v1/chat/completions", json=BODY) as response,
    ):
        await read_until(response, KEEP_ALIVE)
        node.go_on.set()
        error, done, end = (await response.read()).replace(KEEP_ALIVE, b"").split(b"\n\n")
        assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "out of memory"
        assert (done, end) == (b"data: [DONE]", b"")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_stream_begun_with_keep_alive_comments_can_be_served_by_another_node(path: str) -> None:
    async def fail(node: FakeNode, request: web.Request) -> web.StreamResponse:
        await node.go_on.wait()
        return web.json_response({"error": "out of memory"}, status=500)

    busy = {"models": [{"id": "Org/M", "in_flight": 9}]}
    first = FakeNode("n1", speak=fail).holds("Org/M")
    other = FakeNode("n2", speak=pausing(ROLE, chunk("Hello"), STOP, FINAL, DONE), health=busy).holds("Org/M")
    async with gateway_of(other, first, kind="neuron") as cortex:
        await eventually(lambda: cortex.gateway.fleet.view().load(cortex.gateway.fleet.node("n2"), "Org/M"))
        async with cortex.client.post(cortex.url + path, json=BODY) as response:
            await read_until(response, KEEP_ALIVE if "chat" in path else b"event: ping", 2)
            first.go_on.set()
            body = await response.read()
    assert b"Hello" in body and b"error" not in body
    assert body.endswith(DONE if "chat" in path else b'{"type":"message_stop"}\n\n')


async def test_anthropic_client_library_reads_a_stream_with_pings() -> None:
    node = FakeNode(speak=pausing(None, ROLE, chunk("Hello"), None, STOP, FINAL, DONE)).holds("Org/M")
    async with gateway_of(node) as cortex:
        client = anthropic.AsyncAnthropic(base_url=cortex.url, api_key="none", max_retries=0)
        messages: Any = BODY["messages"]
        async with client, client.messages.stream(model="Org/M", messages=messages, max_tokens=9) as stream:
            node.go_on.set()
            async for _ in stream.text_stream:
                node.go_on.set()
            assert await stream.get_final_text() == "Hello"


async def test_openai_client_library_reads_a_stream_with_keep_alive_comments() -> None:
    node = FakeNode(speak=pausing(None, ROLE, chunk("Hello"), None, STOP, DONE)).holds("Org/M")
    async with (
        gateway_of(node) as cortex,
        openai.AsyncOpenAI(base_url=f"{cortex.url}/v1", api_key="none", max_retries=0) as client,
    ):
        # the response begins with a comment before the backend says anything
        stream = await client.chat.completions.create(model="Org/M", messages=BODY["messages"], stream=True)
        node.go_on.set()
        text = ""
        async for part in stream:
            text += part.choices[0].delta.content or ""
            node.go_on.set()
        assert text == "Hello"


@pytest.mark.parametrize(("kind", "stream"), [("neuron", True), ("openai", False)])
async def test_gateway_sends_no_comments_for_helexa_nodes_or_non_streaming_requests(kind: str, stream: bool) -> None:
    node = FakeNode(speak=pausing(None, *((ROLE, chunk("Hello"), STOP, DONE) if stream else ()))).holds("Org/M")
    silent = FakeNode("n2", speak=pausing(None)).holds("Org/Silent")
    async with gateway_of(node, silent, kind=kind) as cortex:
        asked = asyncio.create_task(cortex.ask(stream=stream))
        await node.spoke.wait()
        body = BODY | {"model": "Org/Silent"}
        async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body) as response:
            await read_until(response, KEEP_ALIVE, 5)  # meanwhile, the other node is as silent
        node.go_on.set()
        status, answer = await asked
        assert status == 200
        assert KEEP_ALIVE not in answer if stream else answer["choices"]
