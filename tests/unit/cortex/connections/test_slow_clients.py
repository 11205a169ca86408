"""Timeouts for clients that send or read too slowly, and limits on requests that never end."""

import asyncio
from itertools import repeat

import pytest

from cortex import fake_node
from cortex.fake_node import FakeNode
from cortex.raw_http import BODY, CHUNKED, GET, LINE, chunked, connected, post, read_response
from cortex.running_gateway import Cortex, eventually
from helexa.http import connection_and_timeouts


@pytest.mark.parametrize(
    "partial_head", [b"", b"\r\n", b"POST", LINE + b"\r\nHost: x\r\nX-A: b", post(b"X-A: b")[:-40]]
)
async def test_request_head_that_stays_incomplete_closes_the_connection(
    cortex: Cortex, partial_head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_and_timeouts, "HEAD_SECS", 0.05)
    async with connected(cortex) as (reader, writer):
        writer.write(partial_head)
        assert await reader.read() == b""
    async with connected(cortex) as (reader, writer):  # the second head on a connection has the same timeout
        writer.write(GET % b"")
        assert (await read_response(reader))[0] == 200
        writer.write(partial_head or b"P")
        assert await reader.read() == b""


async def test_client_that_sends_only_empty_lines_slowly_is_disconnected(
    cortex: Cortex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_and_timeouts, "HEAD_SECS", 0.1)
    async with connected(cortex) as (reader, writer):
        closed = asyncio.ensure_future(reader.read())
        while not closed.done():
            writer.write(b"\r\n")
            await asyncio.wait([closed], timeout=0.01)
        assert closed.exception() is not None or closed.result() == b""


async def test_timeout_of_the_request_head_does_not_limit_the_body_or_response(
    cortex: Cortex, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_and_timeouts, "HEAD_SECS", 0.02)

    async def head_timeout() -> None:
        """Wait until the gateway has closed another connection because of its incomplete head."""
        async with connected(cortex) as (reader, writer):
            writer.write(b"POST")
            assert await reader.read() == b""

    async def speak(node: FakeNode, request: object) -> fake_node.web.StreamResponse:
        await head_timeout()
        return fake_node.web.Response(body=fake_node.COMPLETION, content_type="application/json")

    node.speak = speak
    async with connected(cortex) as (reader, writer):
        head, body = post()[: -len(BODY)], BODY
        writer.write(head)
        await head_timeout()
        writer.write(body)
        assert (await read_response(reader))[0] == 200


async def test_client_that_reads_nothing_is_disconnected(
    cortex: Cortex, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def speak(node: FakeNode, request: fake_node.web.Request) -> fake_node.web.StreamResponse:
        response = await fake_node.begin(request)
        while True:
            await response.write(fake_node.chunk("a" * 10_000) * 10)

    monkeypatch.setattr(connection_and_timeouts, "STALL_SECS", 0.1)
    node.speak = speak
    async with connected(cortex) as (reader, writer):
        writer.write(post())
        assert b"200 OK" in await reader.readline()
        await eventually(lambda: node.speaking == 1)
        await eventually(lambda: node.speaking == 0)
    assert not cortex.gateway.fleet.view().in_flight


async def test_disconnect_of_a_client_cancels_its_pipelined_requests(cortex: Cortex, node: FakeNode) -> None:
    node.speak = fake_node.never_end
    async with connected(cortex) as (reader, writer):
        writer.write(post() * 3)
        assert b"200 OK" in await reader.readline()
        await eventually(lambda: node.speaking == 1)
    await eventually(lambda: node.speaking == 0)
    await eventually(lambda: not cortex.gateway.fleet.view().in_flight)
    assert node.bodies == [BODY]


async def test_client_that_reads_slowly_gets_the_complete_response(cortex: Cortex, node: FakeNode) -> None:
    chunks = [fake_node.chunk("a" * 100_000)] * 100

    async def speak(node: FakeNode, request: fake_node.web.Request) -> fake_node.web.StreamResponse:
        return await fake_node.begin(request, *chunks)

    node.speak = speak
    async with connected(cortex) as (reader, writer):
        writer.write(post(b"Connection: close"))
        await eventually(lambda: node.speaking == 1)
        size = 0
        while data := await reader.read(1 << 20):
            size += len(data)
            await asyncio.sleep(0.01)
        assert size > sum(map(len, chunks))


ENDLESS = {
    "line": (b"POST /", b"a"),
    "name": (LINE + b"\r\nHost: localhost\r\nX-", b"a"),
    "value": (LINE + b"\r\nHost: localhost\r\nX-A: ", b"a"),
    "headers": (LINE + b"\r\nHost: localhost\r\n", b"X-A: b\r\n"),
    "extension": (chunked(b"1;"), b"a"),
    "trailers": (chunked(CHUNKED[:-2]), b"X-A: b\r\n"),
    "trailer": (chunked(CHUNKED[:-2]) + b"X-A: ", b"a"),
    "chunks": (chunked(b""), b"1000\r\n" + b"a" * 4096 + b"\r\n"),
    "chunk": (chunked(b"7fffffffffffffff\r\n"), b"a"),
    "body": (
        LINE + b"\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1099511627776\r\n\r\n",
        b"a",
    ),
    "unread": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
    "nothing": (b"", b"\r\n"),
}


@pytest.mark.parametrize("case", ENDLESS)
async def test_client_that_sends_an_endless_head_or_body_is_disconnected(
    cortex: Cortex, node: FakeNode, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_and_timeouts, "HEAD_SECS", 0.3)
    monkeypatch.setattr(connection_and_timeouts, "LINGER_SECS", 0.3)
    begin, continuation = ENDLESS[case]
    async with connected(cortex) as (_, writer):
        writer.write(begin)
        with pytest.raises(ConnectionError):
            for data in repeat(continuation * (32_768 // len(continuation))):
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(0)
    assert node.bodies == []
    assert (await cortex.ask())[0] == 200
