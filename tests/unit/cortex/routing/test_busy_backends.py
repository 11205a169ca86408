"""Third-party backends that interrupt answers at any request, or that answer nothing else during a request."""

import asyncio
import http.server
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from cortex import fake_node
from cortex.fake_node import DONE, FINAL, ROLE, FakeNode, chunk, event
from cortex.running_gateway import Cortex, eventually, running_cortex
from helexa.cortex.fleet import node_client
from ports import free_port

STOP = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
STREAM = [ROLE, chunk("Hel"), chunk("lo"), STOP, FINAL, DONE]


@asynccontextmanager
async def gateway_of(*backends: FakeNode) -> AsyncIterator[Cortex]:
    sections = [{"name": backend.name, "endpoint": backend.url, "kind": "openai"} for backend in backends]
    async with running_cortex(*backends, settings={"neurons": sections}) as cortex:
        yield cortex


async def polls(node: FakeNode, count: int) -> None:
    """Wait until the gateway has polled `node` `count` more times."""
    seen = len(node.polled_paths)
    await eventually(lambda: len(node.polled_paths) >= seen + count)


async def interruptible(node: FakeNode, request: web.Request) -> web.StreamResponse:
    """Stream until the test lets the stream end. A poll cuts the stream, as in llama-cpp-python's server."""
    polled_before = len(node.polled_paths)
    response = await fake_node.begin(request, *STREAM[:2])
    await node.go_on.wait()
    if len(node.polled_paths) == polled_before:
        for piece in STREAM[2:]:
            await response.write(piece)
    return response


async def test_third_party_backend_is_not_polled_during_its_stream() -> None:
    async with (
        FakeNode("single", speak=interruptible).holds("Org/M").serving() as single,
        FakeNode("other").holds("Org/Else").serving() as other,
        gateway_of(single, other) as cortex,
    ):
        asked = asyncio.create_task(cortex.ask(stream=True))
        await eventually(lambda: single.speaking)
        await polls(other, 10)
        single.go_on.set()
        status, body = await asked
        assert (status, body.count(b"error"), body.count(DONE)) == (200, 0, 1)
        assert b'"lo"' in body and b'"stop"' in body
        await polls(single, 1)  # at the end of the stream, polls go on


async def test_third_party_backend_that_sends_nothing_during_a_request_stays_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        FakeNode("single", speak=interruptible).holds("Org/M").serving() as single,
        FakeNode("other").holds("Org/Else").serving() as other,
        gateway_of(single, other) as cortex,
    ):
        single.may_answer_polls.clear()
        monkeypatch.setattr(node_client, "POLL_TIMEOUT_SECS", 0.05)
        asked = [asyncio.create_task(cortex.ask(stream=True)) for _ in range(2)]
        await eventually(lambda: single.speaking == 2)
        await polls(other, 10)
        assert cortex.gateway.fleet.node("single").healthy
        asked.append(asyncio.create_task(cortex.ask(stream=True)))
        await eventually(lambda: single.speaking == 3)  # a new request is forwarded, and waits there
        single.go_on.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 3


async def test_third_party_backend_busy_with_other_clients_stays_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_client, "POLL_TIMEOUT_SECS", 0.05)
    async with FakeNode("single").holds("Org/M").serving() as single, gateway_of(single) as cortex:
        single.may_answer_polls.clear()
        await eventually(lambda: cortex.gateway.fleet.node("single").is_unresponsive)
        node = cortex.gateway.fleet.node("single")
        assert (node.healthy, node.problem) == (True, "/v1/models did not answer in time; see the node's log")
        assert (await cortex.ask())[0] == 200
        single.may_answer_polls.set()
        await eventually(lambda: not cortex.gateway.fleet.node("single").misses)


async def test_node_that_answers_polls_is_preferred_to_a_node_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_client, "POLL_TIMEOUT_SECS", 0.05)
    async with (
        FakeNode("busy").holds("Org/M").serving() as busy,
        FakeNode("idle").holds("Org/M").serving() as idle,
        gateway_of(busy, idle) as cortex,
    ):
        busy.may_answer_polls.clear()
        await eventually(lambda: cortex.gateway.fleet.node("busy").is_unresponsive)
        assert [(await cortex.ask())[0] for _ in range(10)] == [200] * 10
        assert (len(busy.bodies), len(idle.bodies)) == (0, 10)


async def test_third_party_backend_that_refuses_connections_is_down() -> None:
    async with FakeNode("single").holds("Org/M").serving() as single, gateway_of(single) as cortex:
        dead = cortex.gateway.config.neurons[0].model_copy(update={"endpoint": f"http://127.0.0.1:{free_port()}"})
        cortex.gateway.fleet.configure([dead])
        await eventually(lambda: cortex.gateway.fleet.node("single").misses >= 3)
        assert not cortex.gateway.fleet.node("single").healthy


async def test_helexa_node_that_sends_responses_while_its_polls_time_out_stays_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_client, "POLL_TIMEOUT_SECS", 0.05)

    async def stream_on(node: FakeNode, request: web.Request) -> web.StreamResponse:
        response = await fake_node.begin(request)
        while not node.go_on.is_set():
            await response.write(fake_node.chunk("a"))
            await asyncio.sleep(0.005)
        await response.write(DONE)
        return response

    async with FakeNode(speak=stream_on).holds("Org/M").serving() as node, running_cortex(node) as cortex:
        asked = asyncio.create_task(cortex.ask(stream=True))
        await eventually(lambda: node.speaking)
        node.may_answer_polls.clear()
        await eventually(lambda: cortex.gateway.fleet.node("n1").misses >= 4)
        assert cortex.gateway.fleet.node("n1").healthy
        node.go_on.set()
        assert (await asked)[0] == 200
        await eventually(lambda: not cortex.gateway.fleet.node("n1").healthy)


class SingleThreaded(http.server.BaseHTTPRequestHandler):
    """A server that handles one request at a time, as simple servers for one user do."""

    streaming = threading.Event()
    go_on = threading.Event()

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send("application/json", b'{"object":"list","data":[{"id":"Org/M","object":"model"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.streaming.set()
        assert self.go_on.wait(60)
        self._send("text/event-stream", b"".join(STREAM))

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


async def test_requests_to_a_single_threaded_backend_wait_and_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_client, "POLL_TIMEOUT_SECS", 0.05)
    SingleThreaded.streaming.clear()
    SingleThreaded.go_on.clear()
    server = http.server.HTTPServer(("127.0.0.1", 0), SingleThreaded)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        async with (
            FakeNode("other").holds("Org/Else").serving() as other,
            gateway_of(FakeNode("single", url=url), other) as cortex,
        ):
            asked = [asyncio.create_task(cortex.ask(stream=True))]
            await eventually(SingleThreaded.streaming.is_set)
            await polls(other, 10)
            asked += [asyncio.create_task(cortex.ask(stream=True)) for _ in range(2)]
            await eventually(lambda: cortex.gateway.fleet.view().running("single") == {"Org/M": 3})
            await polls(other, 10)
            SingleThreaded.go_on.set()
            assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 3
            assert all(body.endswith(DONE) and b"error" not in body for _, body in await asyncio.gather(*asked))
    finally:
        SingleThreaded.go_on.set()
        await asyncio.to_thread(server.shutdown)
        thread.join(60)
        server.server_close()
