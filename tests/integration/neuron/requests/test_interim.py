"""`102 Processing` responses and real HTTP clients."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.cortex.upstream.client import Upstream
from helexa.http.listener import Listener, bind
from helexa.http.request_cycle_and_disconnects import RequestCycle
from helexa.neuron import access_guard_and_request_logs
from helexa.neuron.access_guard_and_request_logs import Interim
from neuron.fake_models import make_model, release
from neuron.running_node import running

WISH = {"x-helexa-keep-alive": "1"}
PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"


class Slow:
    """An application that responds after `sent` interim responses, or at once with `at_once`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, at_once: bool = False) -> None:
        self.url = ""
        self.sent = 0
        self._enough = asyncio.Event()
        if at_once:
            self._enough.set()
        send_interim = RequestCycle.send_interim

        def counting(call: RequestCycle) -> bool:
            goes_on = send_interim(call)
            self.sent += goes_on
            if self.sent >= 3:
                self._enough.set()
            return goes_on

        monkeypatch.setattr(RequestCycle, "send_interim", counting)
        monkeypatch.setattr(access_guard_and_request_logs, "MAX_SECS", 0.02)

    async def answer(self, request: Request) -> Response:
        await request.body()
        await self._enough.wait()
        return Response(b"hello")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = Starlette(routes=[Route("/", self.answer, methods=["GET", "POST"])])
        server, bound = Listener(Interim(app)), bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve(bound))
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


async def by_aiohttp(url: str) -> bytes:
    async with aiohttp.ClientSession() as client:
        for _ in range(2):  # the second request reuses the connection
            async with client.post(url, headers=WISH, data=b"x") as response:
                body = await response.read()
    return body


async def by_httpx(url: str) -> bytes:
    async with httpx2.AsyncClient() as client:
        for _ in range(2):
            body = (await client.post(url, headers=WISH, content=b"x")).content
    return body


async def by_curl(url: str) -> bytes:
    command = ["curl", "-s", "-m", "30", "-H", "x-helexa-keep-alive: 1", "-d", "x", url, "--next", "-s", url]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return output[len(b"hello") :]


async def by_the_gateway(url: str) -> bytes:
    client = Upstream()
    try:
        for _ in range(2):
            answer = await client.ask(b"POST", url, "/", [], b"x", interim=True)
            body = await answer.chunk()
            answer.close()
        return body
    finally:
        client.close()


NO_CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")


@pytest.mark.parametrize("post", [by_aiohttp, by_httpx, pytest.param(by_curl, marks=NO_CURL), by_the_gateway])
async def test_slow_response_is_preceded_by_http_102_responses(
    monkeypatch: pytest.MonkeyPatch, post: Callable[[str], Awaitable[bytes]]
) -> None:
    app = Slow(monkeypatch)
    async with app.serving() as url, asyncio.timeout(60):
        assert await post(url) == b"hello"
        assert app.sent >= 3


async def send_raw(url: str, header: str, version: str = "1.1") -> bytes:
    """Send one request. Return all bytes that the node sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    local_address = "{}:{}".format(*writer.get_extra_info("sockname"))
    lines = f"GET / HTTP/{version}\r\nhost: a\r\nconnection: close\r\n{header.format(here=local_address)}\r\n"
    writer.write(lines.encode())
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_no_http_102_response_is_sent_after_the_final_response(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Slow(monkeypatch)
    async with app.serving() as url, asyncio.timeout(60):
        got = await send_raw(url, "x-helexa-keep-alive: 15; from={here}\r\n")
    head, _, remainder = got.partition(b"HTTP/1.1 200 OK\r\n")
    assert head == PROCESSING * 3
    assert b"102" not in remainder and remainder.endswith(b"\r\n\r\nhello")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x-helexa-keep-alive: 15; from=127.0.0.1:1\r\n",  # the address of a proxy's client
        "x-helexa-keep-alive: soon\r\n",
        "x-helexa-keep-alive: -1\r\n",
        "x-helexa-keep-alive: 15; from=\r\n",
    ],
)
async def test_request_without_a_valid_interim_header_starts_no_timer_for_102_responses(
    monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a timer was started")

    monkeypatch.setattr(access_guard_and_request_logs, "_Timer", refuse)
    async with Slow(monkeypatch, at_once=True).serving() as url, asyncio.timeout(60):
        assert (await send_raw(url, header)).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(("header_value", "secs"), [(b"0", 1), (b"15", 15), (b"999999", 300), (b"9999999", None)])
def test_requested_interval_of_interim_responses_is_limited_to_its_bounds(
    header_value: bytes, secs: int | None
) -> None:
    headers = [(access_guard_and_request_logs.INTERIM_HEADER, header_value)]
    scope = {"headers": headers, "client": ("a", 1), "extensions": {"helexa.interim": print}}
    assert access_guard_and_request_logs.interval_secs(scope) == secs


async def test_client_of_http_1_0_gets_no_interim_response(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    app = Slow(monkeypatch, at_once=True)
    monkeypatch.setattr(access_guard_and_request_logs, "_Timer", lambda secs, send: calls.append(send()) or Idle())
    async with app.serving() as url, asyncio.timeout(60):
        assert (await send_raw(url, "x-helexa-keep-alive: 1\r\n", "1.0")).startswith(b"HTTP/1.1 200 OK\r\n")
    assert calls == [False]


class Idle:
    def stop(self) -> None:
        """Do nothing."""


async def test_node_sends_http_102_responses_until_the_requested_load_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(access_guard_and_request_logs, "MAX_SECS", 0.02)
    model = make_model(tmp_path, "slow")
    async with running({}) as node, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(node.url.rsplit(":", 1)[1]))
        body = b'{"model_id":"org/tiny","source":"file:%s"}' % str(model).encode()
        head = b"POST /models/load HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"x-helexa-keep-alive: 1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        assert await reader.readexactly(2 * len(PROCESSING)) == 2 * PROCESSING
        release(model)
        while (line := await reader.readuntil(b"\r\n\r\n")) == PROCESSING:
            pass
        assert line.startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()
