"""Connections over the limits of a listener, over real sockets."""

import asyncio
import socket
from typing import Any

import orjson
import pytest

from descriptors import no_descriptors
from helexa.http import idle_connections
from helexa.http.acceptor import ConnectionLimits
from http_listener import GET, eventually, final_response, hello, listening

TWO = ConnectionLimits(total=2, per_address=2, rejected=2)
END = b"0\r\n\r\n"


class HeldApplication:
    """An application whose responses wait until `released` is set."""

    def __init__(self) -> None:
        self.running = 0
        self.released = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.running += 1
        await self.released.wait()
        await hello(scope, receive, send)


@pytest.mark.parametrize(
    "limits",
    [TWO, ConnectionLimits(total=100, per_address=2, rejected=2)],
    ids=["total", "per address"],
)
async def test_connections_above_the_limit_get_a_503_with_retry_after(limits: ConnectionLimits) -> None:
    application = HeldApplication()
    async with listening(application, limits=limits) as (_, connect):
        busy = [await connect() for _ in range(2)]
        for _, writer in busy:
            writer.write(GET % b"a")
        await eventually(lambda: application.running == 2)
        for _ in range(5):
            head, content = await final_response(await connect(), GET % b"b")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in head
            assert b"\r\nconnection: close" in head
            assert orjson.loads(content)["error"]["code"] == "rate_limit_exceeded"
        application.released.set()
        for reader, _ in busy:
            assert (await reader.readuntil(END)).endswith(b"/a\r\n" + END)


async def test_closed_connection_no_longer_counts_for_the_connection_limit() -> None:
    application = HeldApplication()
    application.released.set()
    async with listening(application, limits=TWO, keep_alive_secs=1000) as (listener, connect):
        for _ in range(10):
            reader, writer = await connect()
            writer.write(GET % b"a")
            await reader.readuntil(END)
            writer.close()
            await eventually(lambda: not listener._service.connections)
    assert application.running == 10


async def test_idle_connection_is_closed_for_a_new_connection_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_connections, "EVICTABLE_SECS", 0.0)
    async with listening(hello, limits=TWO, keep_alive_secs=1000) as (_, connect):
        silent, used = await connect(), await connect()
        used[1].write(GET % b"a")
        await used[0].readuntil(END)
        third = await connect()
        third[1].write(GET % b"b")
        assert (await third[0].readuntil(END)).startswith(b"HTTP/1.1 200 ")
        assert await silent[0].read() == b""  # the longest idle connection


async def test_request_that_arrived_before_its_deadline_is_answered_although_read_late() -> None:
    """On a busy machine, a deadline may be over before the event loop reads a request that arrived in time."""
    application = HeldApplication()
    async with listening(application, limits=TWO, keep_alive_secs=1000) as (listener, connect):
        connections = listener._service.connections
        busy = [await connect() for _ in range(2)]
        await eventually(lambda: len(connections) == 2)
        served = set(connections)
        rejected = await connect()
        await eventually(lambda: len(connections) == 3)
        (late,) = connections - served
        rejected[1].write(GET % b"a")  # is in the kernel now
        assert late._timer._callback is not None
        late._timer._callback()
        assert (await rejected[0].read()).startswith(b"HTTP/1.1 503 ")
        busy[0][1].write(GET % b"b")
        assert sum(connection.evict() for connection in served) == 1  # the other one has a request
        application.released.set()
        assert (await busy[0][0].readuntil(END)).startswith(b"HTTP/1.1 200 ")


async def test_connection_with_a_running_request_is_not_closed_to_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_connections, "EVICTABLE_SECS", 0.0)
    application = HeldApplication()
    async with listening(application, limits=TWO) as (_, connect):
        busy = [await connect() for _ in range(2)]
        for _, writer in busy:
            writer.write(GET % b"a")
        await eventually(lambda: application.running == 2)
        assert (await final_response(await connect(), GET % b"b"))[0].startswith(b"HTTP/1.1 503 ")
        application.released.set()
        for reader, _ in busy:
            await reader.readuntil(END)


async def test_new_connections_wait_while_too_many_are_being_rejected() -> None:
    application = HeldApplication()
    async with listening(application, limits=TWO, keep_alive_secs=1000) as (listener, connect):
        busy = [await connect() for _ in range(2)]
        for _, writer in busy:
            writer.write(GET % b"a")
        await eventually(lambda: application.running == 2)
        waiting = [await connect() for _ in range(20)]
        await eventually(lambda: len(listener._service.connections) == 4)
        for reader, writer in waiting:
            assert (await final_response((reader, writer), GET % b"b"))[0].startswith(b"HTTP/1.1 503 ")
            assert len(listener._service.connections) <= 4
            writer.close()
        application.released.set()


async def test_new_connections_wait_while_file_descriptors_run_out(caplog: pytest.LogCaptureFixture) -> None:
    async with listening(hello) as (_, connect):
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setblocking(False)
            with no_descriptors():
                await loop.sock_connect(client, connect.address)
                await eventually(lambda: "Too many open files" in caplog.text)
            await loop.sock_sendall(client, GET % b"a")
            assert (await loop.sock_recv(client, 100)).startswith(b"HTTP/1.1 200 ")
    assert [record.name for record in caplog.records if record.levelname != "INFO"] == ["helexa.http.acceptor"]


def test_connection_limits_leave_file_descriptors_for_uses_other_than_connections() -> None:
    for descriptors in (256, 1024, 4096, 1 << 16):
        limits = ConnectionLimits.within(descriptors, each=2, other_descriptors=descriptors // 8)
        assert 2 * limits.total + limits.rejected + descriptors // 8 + 64 <= descriptors
        assert limits.per_address == limits.total // 2
    assert ConnectionLimits.within(1 << 16).total == 4096
    assert ConnectionLimits.within(1 << 16, 100, 7) == ConnectionLimits(100, 7, 256)
