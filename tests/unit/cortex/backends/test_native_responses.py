"""Answers of backends that have the Responses API themselves."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from cortex.fake_node import RESPONSE_STREAM, FakeNode, begin
from cortex.running_gateway import Cortex, running_cortex
from helexa.core.sse import EventParser

BODY = {"id": "resp_1", "object": "response", "status": "completed", "output": [], "usage": {"input_tokens": 7}}
UNNAMED = [b'data: {"type":"response.completed","response":{"usage":null}}\n\n']


@pytest.fixture
async def backend() -> AsyncIterator[FakeNode]:
    async with FakeNode().holds("Org/M").serving() as backend:
        yield backend


@pytest.fixture
async def gateway(backend: FakeNode) -> AsyncIterator[Cortex]:
    settings = {"neurons": [{"name": "n1", "endpoint": backend.url, "kind": "openai"}]}
    async with running_cortex(backend, settings=settings) as cortex:
        yield cortex


async def events(cortex: Cortex) -> list[str]:
    """Return the names of the events of a streamed response, or the code of the error response."""
    body = {"model": "Org/M", "input": "Hi", "stream": True}
    async with cortex.client.post(f"{cortex.url}/v1/responses", json=body) as response:
        if response.status != 200:
            return [(await response.json())["error"]["code"]]
        return [event.event for event in EventParser().feed(await response.read())]


@pytest.mark.parametrize("stream", [RESPONSE_STREAM, UNNAMED, [RESPONSE_STREAM[1].replace(b"\n", b"\r\n")]])
async def test_complete_stream_of_a_native_responses_backend_is_forwarded(
    gateway: Cortex, backend: FakeNode, stream: list[bytes]
) -> None:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return await begin(request, *stream)

    backend.speak = speak
    assert "error" not in await events(gateway)


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (RESPONSE_STREAM[:1], ["response.output_text.delta", "error"]),
        ([b'event: x\ndata: {"delta":"\\"type\\":\\"response.completed\\""}\n\n'], ["x", "error"]),
        ([b"<html>Bad Gateway</html>"], ["upstream_malformed_response"]),
        ([], ["upstream_malformed_response"]),
    ],
)
async def test_truncated_stream_of_a_native_responses_backend_ends_with_an_error(
    gateway: Cortex, backend: FakeNode, stream: list[bytes], expected: list[str]
) -> None:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return await begin(request, *stream)

    backend.speak = speak
    assert await events(gateway) == expected


ERROR = b'data: {"error": {"message": "the model crashed", "type": "server_error", "code": "500"}}\n\n'


@pytest.mark.parametrize(
    "stream",
    [[ERROR], [RESPONSE_STREAM[0], ERROR], [RESPONSE_STREAM[0] + ERROR], [RESPONSE_STREAM[0], ERROR[:40], ERROR[40:]]],
)
async def test_error_event_without_a_type_becomes_a_valid_error_event(
    gateway: Cortex, backend: FakeNode, stream: list[bytes]
) -> None:
    """LiteLLM sends such errors, and clients report a missing field `type` instead of the message."""

    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return await begin(request, *stream)

    backend.speak = speak
    body = {"model": "Org/M", "input": "Hi", "stream": True}
    async with gateway.client.post(f"{gateway.url}/v1/responses", json=body) as response:
        if stream[0] == ERROR:
            assert (await response.json())["error"]["message"] == "the model crashed"
            return
        first, last = EventParser().feed(await response.read())
    assert (first.event, last.event) == ("response.output_text.delta", "error")
    assert json.loads(last.data)["message"] == "the model crashed"


@pytest.mark.parametrize("headers", [{"content-type": "text/plain"}, {"content-type": "Application/JSON"}])
async def test_non_streaming_backend_response_is_forwarded_with_any_content_type(
    gateway: Cortex, backend: FakeNode, headers: dict[str, str]
) -> None:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return web.Response(body=json.dumps(BODY).encode(), status=201, headers=headers)

    backend.speak = speak
    body: Any = {"model": "Org/M", "input": "Hi"}
    async with gateway.client.post(f"{gateway.url}/v1/responses", json=body) as response:
        assert (response.status, response.content_type) == (200, "application/json")
        assert (await response.json())["id"] == "resp_1"
