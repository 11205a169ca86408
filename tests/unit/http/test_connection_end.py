"""How connections end: slow clients, unread bodies, shutdown. Over raw sockets, with shortened timeouts."""

import asyncio
import gc
import http.client
import socket
import weakref
from typing import Any

import pytest

from helexa.http import connection_and_timeouts, request_cycle_and_disconnects
from helexa.http.connection_and_timeouts import ClientConnection
from helexa.http.listener import Listener
from helexa.http.request_cycle_and_disconnects import ClientDisconnected, DisconnectGuard
from http_listener import GET, OK, body, eventually, final_response, hello, listening, start

CLOSE = b"GET /%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
SIZE = 8 << 20


def only(listener: Listener) -> ClientConnection:
    (server_side,) = listener._service.connections
    return server_side


async def narrow(address: Any, buffer_bytes: int = 4096) -> socket.socket:
    """Return a client socket with a receive buffer of `buffer_bytes`, which reads only when a test calls recv."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, address)
    return client


async def fill(listener: Listener, send: Any) -> None:
    """Start a response and send until bytes stay in the write buffer, below the limit at which `send` waits."""
    await send(OK)
    while not only(listener)._transport.get_write_buffer_size():
        await send(body(bytes(10_000), more=True))
        await asyncio.sleep(0)
    assert only(listener).writable is None


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    await send({**start((b"content-length", b"5")), "status": 413})
    await send(body(b"hello"))


async def test_response_that_completes_during_shutdown_is_still_sent() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        listener.should_exit = True
        await hello(scope, receive, send)

    async with listening(application) as (listener, connect):
        assert (await final_response(await connect(), GET % b"a"))[1].endswith(b"/a\r\n0\r\n\r\n")


async def test_client_that_stops_reading_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_and_timeouts, "STALL_SECS", 0.1)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await fill(listener, send)
        await send(body(b""))

    async with listening(application) as (listener, connect):
        with await narrow(connect.address) as client:
            await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.0\r\n\r\n")
            await eventually(lambda: bool(listener._service.connections))
            await eventually(lambda: not listener._service.connections)


async def test_slow_client_that_keeps_reading_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_and_timeouts, "STALL_SECS", 0.5)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send(start((b"content-length", b"%d" % SIZE)))
        await send(body(bytes(SIZE)))

    loop, size = asyncio.get_running_loop(), 0
    async with listening(application) as (_, connect):
        with await narrow(connect.address, 1 << 16) as client:
            await loop.sock_sendall(client, CLOSE % b"")
            while chunk := await loop.sock_recv(client, 1 << 16):
                size += len(chunk)
                await asyncio.sleep(0.01)
    assert size > SIZE


async def test_half_closed_client_counts_as_disconnected_despite_unsent_bytes() -> None:
    outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await fill(listener, send)
        filled.set()
        try:
            with scope["extensions"][DisconnectGuard.NAME]:
                await asyncio.Event().wait()
        except ClientDisconnected:
            outcome.set_result(True)

    filled = asyncio.Event()
    async with listening(application) as (listener, connect):
        with await narrow(connect.address) as client:
            await asyncio.get_running_loop().sock_sendall(client, GET % b"")
            await filled.wait()
            client.shutdown(socket.SHUT_WR)
            assert await outcome


async def test_one_read_with_thousands_of_requests_is_parsed_in_bounded_parts() -> None:
    released = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await released.wait()
        await hello(scope, receive, send)

    async with listening(application) as (listener, connect):
        reader, writer = await connect()
        writer.write(b"".join(GET % b"%d" % number for number in range(4000)))
        await eventually(lambda: bool(listener._service.connections) and only(listener)._paused)
        assert len(only(listener)._cycles) < 500
        released.set()
        for number in range(4000):
            assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"/%d\r\n0\r\n\r\n" % number)


LATE = b"POST /0 HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (1 << 20)


async def test_requests_after_an_unread_body_are_parsed_in_bounded_parts() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/0":
            await asyncio.Event().wait()
        await hello(scope, receive, send)

    async with listening(application) as (listener, connect):
        reader, writer = await connect()
        writer.write(LATE)
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(bytes(1 << 20) + b"".join(GET % b"%d" % number for number in range(1, 4000)))
        await eventually(lambda: only(listener)._paused)
        assert len(only(listener)._cycles) < 500


async def test_overlong_request_head_after_an_unread_body_is_a_431() -> None:
    async with listening(hello) as (_, connect):
        reader, writer = await connect()
        writer.write(LATE)
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(bytes(1 << 20) + b"GET / HTTP/1.1\r\nHost: x\r\nX-A: %s\r\n\r\n" % (b"a" * (40 << 10)))
        assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("extra", [GET % b"b", b"what?\r\n\r\n", bytes(1 << 20)], ids=["request", "malformed", "1 MiB"])
async def test_bytes_after_a_request_with_connection_close_are_dropped(
    extra: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_received, size = ClientConnection.data_received, 0
    request = b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + extra  # the server closes HTTP/1.0 connections

    def count_bytes(self: ClientConnection, data: bytes) -> None:
        nonlocal size
        size += len(data)
        data_received(self, data)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"] == "/a"
        await eventually(lambda: size == len(request))
        assert len(only(listener)._cycles) == 1
        await hello(scope, receive, send)

    monkeypatch.setattr(ClientConnection, "data_received", count_bytes)
    async with listening(application) as (listener, connect):
        reader, writer = await connect()
        writer.write(request)
        assert (await reader.read()).endswith(b"\r\n\r\nhello /a")


@pytest.mark.parametrize("header", [b"", b"x" * SIZE], ids=["body", "head"])
async def test_client_that_is_still_sending_gets_the_error_response(header: bytes) -> None:
    def post() -> int:
        client = http.client.HTTPConnection(*connect.address)
        client.request("POST", "/", bytes(SIZE), {"connection": "close", "x-a": header})
        try:
            return client.getresponse().status
        finally:
            client.close()

    async with listening(refuse) as (_, connect):
        assert await asyncio.to_thread(post) == (431 if header else 413)


async def test_reading_of_an_unwanted_body_ends_after_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_and_timeouts, "LINGER_SECS", 0.1)
    async with listening(refuse) as (_, connect):
        _, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 999999999999\r\n\r\n")
        with pytest.raises(ConnectionError):
            while True:
                writer.write(bytes(1000))
                await writer.drain()
                await asyncio.sleep(0)


async def test_connection_accepted_during_shutdown_is_closed_without_a_response() -> None:
    async with listening(hello) as (listener, connect):
        listener._service.stopping = True
        assert await (await connect())[0].read() == b""


async def test_request_body_that_arrives_too_slowly_raises_a_timeout_in_the_application(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_cycle_and_disconnects, "BODY_SECS", 0.3)
    outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        try:
            while (await receive())["more_body"]:
                pass
        except TimeoutError:
            outcome.set_result(True)
            await hello(scope, receive, send)

    async with listening(application) as (_, connect):
        _, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n")
        while not outcome.done():
            writer.write(b"a")
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("request_", [b"", GET % b"a"], ids=["none", "one"])
async def test_closed_connection_object_is_freed_without_the_garbage_collector(request_: bytes) -> None:
    async with listening(hello) as (listener, connect):
        reader, writer = await connect()
        writer.write(request_)
        if request_:
            await reader.readuntil(b"0\r\n\r\n")
        await eventually(lambda: bool(listener._service.connections))
        connection_ref = weakref.ref(only(listener))
        gc.collect()
        gc.disable()
        try:
            writer.close()
            await eventually(lambda: not listener._service.connections)
            await eventually(lambda: connection_ref() is None)
        finally:
            gc.enable()


async def test_connection_close_in_a_trailer_closes_the_connection() -> None:
    head = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with listening(hello, keep_alive_secs=1000) as (_, connect):
        assert (await final_response(await connect(), head + b"0\r\nConnection: close\r\n\r\n"))[1].endswith(
            b"0\r\n\r\n"
        )
        reader, writer = await connect()
        writer.write(head)
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"0\r\nConnection: close\r\n\r\n")  # after the response
        assert await reader.read() == b""


async def test_response_start_without_headers_gets_a_status_line_and_a_date() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({**OK, "status": 204})
        await send(body(b""))

    async with listening(application) as (_, connect):
        _, remaining = await final_response(await connect(), GET % b"a" + CLOSE % b"b")
    assert remaining.startswith(b"HTTP/1.1 204 No Content\r\ndate: ")


async def test_rejected_response_head_does_not_affect_the_next_response() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(RuntimeError):
            await send(start((b"content-length", b"3"), (b"x-a", b"b\r\n")))
        await hello(scope, receive, send)

    async with listening(application) as (_, connect):
        assert (await final_response(await connect(), CLOSE % b"a"))[1] == b"6\r\nhello \r\n2\r\n/a\r\n0\r\n\r\n"


async def test_partial_request_head_times_out_before_the_keep_alive_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_and_timeouts, "HEAD_SECS", 0.1)
    async with listening(hello, keep_alive_secs=1000) as (_, connect):
        assert (await final_response(await connect(), GET % b"a" + b"GET / HT"))[1].endswith(b"0\r\n\r\n")


async def test_internal_error_while_parsing_a_request_gives_a_500(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_and_timeouts, "target", lambda url: 1 // 0)
    async with listening(hello) as (_, connect):
        assert (await final_response(await connect(), GET % b"a"))[0].startswith(b"HTTP/1.1 500 ")
    assert "ZeroDivisionError" in caplog.text


EXPECT = b"POST /a HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"12"], ids=["nothing", "part"])
async def test_response_sent_before_100_continue_closes_the_connection(sent: bytes) -> None:
    async with listening(hello, keep_alive_secs=1000) as (_, connect):
        head, content = await final_response(await connect(), EXPECT + sent)
    assert b"\r\nconnection: close\r\n" in head
    assert content.startswith(b"6\r\nhello ")
    assert b"HTTP/1.1" not in content


@pytest.mark.parametrize("request_", [EXPECT + b"12345", EXPECT.replace(b"5", b"0")], ids=["all sent", "no body"])
async def test_connection_stays_open_if_the_body_arrived_without_100_continue(request_: bytes) -> None:
    async with listening(hello, keep_alive_secs=1000) as (_, connect):
        head, content = await final_response(await connect(), request_ + CLOSE % b"b")
    assert b"connection: close" not in head
    assert content.count(b"HTTP/1.1 200 OK") == 1


async def test_connection_stays_open_after_a_request_with_100_continue() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await hello(scope, receive, send)

    async with listening(application, keep_alive_secs=1000) as (_, connect):
        reader, writer = await connect()
        writer.write(EXPECT)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        head, content = await final_response((reader, writer), b"12345" + CLOSE % b"b")
    assert b"connection: close" not in head
    assert content.count(b"HTTP/1.1 200 OK") == 1
