"""The response to a client ends with the last event of a backend's stream."""

from typing import Any

from aiohttp import web

from cortex.fake_node import DONE, FakeNode, begin, chunk, event
from cortex.running_gateway import eventually, running_cortex


async def late_end(node: FakeNode, request: web.Request) -> web.StreamResponse:
    """Send a whole stream, but end the response only when the test says so."""
    stop = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    response = await begin(request, chunk("Hello"), stop, DONE)
    await node.go_on.wait()
    return response


async def test_client_that_closes_after_the_done_event_is_not_recorded_as_disconnected() -> None:
    async with FakeNode(speak=late_end).holds("Org/M").serving() as backend:
        settings: dict[str, Any] = {"neurons": [{"name": "n1", "endpoint": backend.url, "kind": "openai"}]}
        async with running_cortex(backend, settings=settings) as cortex:
            body = {"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
            async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body) as response:
                await response.content.readuntil(b"[DONE]\n\n")
            backend.go_on.set()

            async def row() -> Any:
                return await cortex.gateway.ledger.recent(1)

            await eventually(row)
            assert [(entry["status"], entry["client_gone"]) for entry in await row()] == [(200, False)]


async def test_backend_connection_is_reused_although_the_response_ends_after_done() -> None:
    async with FakeNode(speak=late_end).holds("Org/M").serving() as backend:
        backend.go_on.set()
        peers: set[Any] = set()

        async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
            peers.add(request.transport and request.transport.get_extra_info("peername"))
            return await late_end(node, request)

        backend.speak = speak
        settings: dict[str, Any] = {"neurons": [{"name": "n1", "endpoint": backend.url, "kind": "openai"}]}
        async with running_cortex(backend, settings=settings) as cortex:
            for _ in range(3):
                assert b"[DONE]" in (await cortex.ask(stream=True))[1]
                await eventually(lambda: cortex.gateway.fleet.view().in_flight == {})
    assert len(peers) == 1
