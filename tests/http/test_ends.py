"""How connections end, and who is not waited for: over raw sockets, with the patience of the server made short."""

import asyncio
import gc
import http.client
import socket
import weakref
from typing import Any

import pytest

from helexa.http.connections import call, connection
from helexa.http.connections.client_disconnect import ClientGone, HangUp
from helexa.http.connections.connection import Connection
from helexa.http.listener import Listener
from listening import GET, OK, body, eventually, hello, listening, said, start

CLOSE = b"GET /%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
SIZE = 8 << 20


def only(listener: Listener) -> Connection:
    (one,) = listener._service.connections
    return one


async def narrow(address: Any, room: int = 4096) -> socket.socket:
    """A client that takes what it is told to, and has room for little."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, address)
    return client


async def fill(listener: Listener, send: Any) -> None:
    """Begin an answer and go on until a little of it stays unsent: too little for the server to wait with the rest."""
    await send(OK)
    while not only(listener)._transport.get_write_buffer_size():
        await send(body(bytes(10_000), more=True))
        await asyncio.sleep(0)
    assert only(listener).room is None


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    await send({**start((b"content-length", b"5")), "status": 413})
    await send(body(b"hello"))


async def test_an_answer_that_is_complete_when_the_end_is_told_arrives() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        listener.should_exit = True
        await hello(scope, receive, send)

    async with listening(answer) as (listener, connect):
        assert (await said(await connect(), GET % b"a"))[1].endswith(b"/a\r\n0\r\n\r\n")


async def test_who_does_not_take_the_rest_of_the_last_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TAKE_SECS", 0.1)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await fill(listener, send)
        await send(body(b""))

    async with listening(answer) as (listener, connect):
        with await narrow(connect.address) as client:
            await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.0\r\n\r\n")
            await eventually(lambda: bool(listener._service.connections))
            await eventually(lambda: not listener._service.connections)


async def test_who_takes_all_the_time_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TAKE_SECS", 0.5)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send(start((b"content-length", b"%d" % SIZE)))
        await send(body(bytes(SIZE)))

    loop, size = asyncio.get_running_loop(), 0
    async with listening(answer) as (_, connect):
        with await narrow(connect.address, 1 << 16) as client:
            await loop.sock_sendall(client, CLOSE % b"")
            while taken := await loop.sock_recv(client, 1 << 16):
                size += len(taken)
                await asyncio.sleep(0.01)
    assert size > SIZE


async def test_who_closes_its_sending_side_is_gone_whatever_is_unsent() -> None:
    outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await fill(listener, send)
        filled.set()
        try:
            with scope["extensions"][HangUp.NAME]:
                await asyncio.Event().wait()
        except ClientGone:
            outcome.set_result(True)

    filled = asyncio.Event()
    async with listening(answer) as (listener, connect):
        with await narrow(connect.address) as client:
            await asyncio.get_running_loop().sock_sendall(client, GET % b"")
            await filled.wait()
            client.shutdown(socket.SHUT_WR)
            assert await outcome


async def test_one_read_makes_no_more_requests_than_may_wait() -> None:
    answered = asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await answered.wait()
        await hello(scope, receive, send)

    async with listening(answer) as (listener, connect):
        reader, writer = await connect()
        writer.write(b"".join(GET % b"%d" % number for number in range(4000)))
        await eventually(lambda: bool(listener._service.connections) and only(listener)._paused)
        assert len(only(listener)._calls) < 500
        answered.set()
        for number in range(4000):
            assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"/%d\r\n0\r\n\r\n" % number)


LATE = b"POST /0 HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (1 << 20)


async def test_one_read_with_the_end_of_an_unwanted_body_makes_no_more_requests_than_may_wait() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/0":
            await asyncio.Event().wait()
        await hello(scope, receive, send)

    async with listening(answer) as (listener, connect):
        reader, writer = await connect()
        writer.write(LATE)
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(bytes(1 << 20) + b"".join(GET % b"%d" % number for number in range(1, 4000)))
        await eventually(lambda: only(listener)._paused)
        assert len(only(listener)._calls) < 500


async def test_head_behind_an_unwanted_body_is_limited_like_any_other() -> None:
    async with listening(hello) as (_, connect):
        reader, writer = await connect()
        writer.write(LATE)
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(bytes(1 << 20) + b"GET / HTTP/1.1\r\nHost: x\r\nX-A: %s\r\n\r\n" % (b"a" * (40 << 10)))
        assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("behind", [GET % b"b", b"what?\r\n\r\n", bytes(1 << 20)], ids=["one", "none", "much"])
async def test_what_comes_behind_the_last_request_is_dropped(behind: bytes) -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"] == "/a"
        await asyncio.sleep(0.05)  # for what is behind to come
        assert len(only(listener)._calls) == 1
        await hello(scope, receive, send)

    async with listening(answer) as (listener, connect):
        reader, writer = await connect()
        writer.write(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + behind)  # which this server does not
        assert (await reader.read()).endswith(b"\r\n\r\nhello /a")


@pytest.mark.parametrize("header", [b"", b"x" * SIZE], ids=["body", "head"])
async def test_who_is_refused_while_still_sending_reads_why(header: bytes) -> None:
    def ask() -> int:
        client = http.client.HTTPConnection(*connect.address)
        client.request("POST", "/", bytes(SIZE), {"connection": "close", "x-a": header})
        try:
            return client.getresponse().status
        finally:
            client.close()

    async with listening(refuse) as (_, connect):
        assert await asyncio.to_thread(ask) == (431 if header else 413)


async def test_nobody_is_heard_out_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_SECS", 0.1)
    async with listening(refuse) as (_, connect):
        _, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 999999999999\r\n\r\n")
        with pytest.raises(ConnectionError):
            while True:
                writer.write(bytes(1000))
                await writer.drain()
                await asyncio.sleep(0)


async def test_who_comes_while_the_server_ends_is_not_waited_for() -> None:
    async with listening(hello) as (listener, connect):
        listener._service.stopping = True
        assert await (await connect())[0].read() == b""


async def test_a_body_that_comes_drop_by_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "BODY_SECS", 0.3)
    outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        try:
            while (await receive())["more_body"]:
                pass
        except TimeoutError:
            outcome.set_result(True)
            await hello(scope, receive, send)

    async with listening(answer) as (_, connect):
        _, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n")
        while not outcome.done():
            writer.write(b"a")
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("request_", [b"", GET % b"a"], ids=["none", "one"])
async def test_a_connection_leaves_no_cycle(request_: bytes) -> None:
    async with listening(hello) as (listener, connect):
        reader, writer = await connect()
        writer.write(request_)
        if request_:
            await reader.readuntil(b"0\r\n\r\n")
        await eventually(lambda: bool(listener._service.connections))
        left = weakref.ref(only(listener))
        gc.collect()
        gc.disable()
        try:
            writer.close()
            await eventually(lambda: not listener._service.connections)
            await asyncio.sleep(0.01)  # for the loop to let go
            assert left() is None
        finally:
            gc.enable()


async def test_a_trailer_may_end_the_connection() -> None:
    head = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with listening(hello, keep_alive_secs=1000) as (_, connect):
        assert (await said(await connect(), head + b"0\r\nConnection: close\r\n\r\n"))[1].endswith(b"0\r\n\r\n")
        reader, writer = await connect()
        writer.write(head)
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"0\r\nConnection: close\r\n\r\n")  # behind the answer
        assert await reader.read() == b""


async def test_a_head_without_headers_ends_once() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({**OK, "status": 204})
        await send(body(b""))

    async with listening(answer) as (_, connect):
        _, rest = await said(await connect(), GET % b"a" + CLOSE % b"b")
    assert rest.startswith(b"HTTP/1.1 204 No Content\r\ndate: ")


async def test_a_head_that_is_refused_leaves_nothing_behind() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(RuntimeError):
            await send(start((b"content-length", b"3"), (b"x-a", b"b\r\n")))
        await hello(scope, receive, send)

    async with listening(answer) as (_, connect):
        assert (await said(await connect(), CLOSE % b"a"))[1] == b"6\r\nhello \r\n2\r\n/a\r\n0\r\n\r\n"


async def test_half_a_head_behind_a_request_is_not_waited_for_as_if_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECS", 0.1)
    async with listening(hello, keep_alive_secs=1000) as (_, connect):
        assert (await said(await connect(), GET % b"a" + b"GET / HT"))[1].endswith(b"0\r\n\r\n")


async def test_a_fault_of_the_server_is_not_the_clients(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "target", lambda url: 1 // 0)
    async with listening(hello) as (_, connect):
        assert (await said(await connect(), GET % b"a"))[0].startswith(b"HTTP/1.1 500 ")
    assert "ZeroDivisionError" in caplog.text


EXPECT = b"POST /a HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"12"], ids=["nothing", "part"])
async def test_answer_before_100_continue_closes_the_connection(sent: bytes) -> None:
    async with listening(hello, keep_alive_secs=1000) as (_, connect):
        head, content = await said(await connect(), EXPECT + sent)
    assert b"\r\nconnection: close\r\n" in head
    assert content.startswith(b"6\r\nhello ")
    assert b"HTTP/1.1" not in content


@pytest.mark.parametrize("request_", [EXPECT + b"12345", EXPECT.replace(b"5", b"0")], ids=["all sent", "no body"])
async def test_answer_before_100_continue_keeps_the_connection_if_the_body_is_complete(request_: bytes) -> None:
    async with listening(hello, keep_alive_secs=1000) as (_, connect):
        head, content = await said(await connect(), request_ + CLOSE % b"b")
    assert b"connection: close" not in head
    assert content.count(b"HTTP/1.1 200 OK") == 1


async def test_connection_stays_open_after_100_continue() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await hello(scope, receive, send)

    async with listening(answer, keep_alive_secs=1000) as (_, connect):
        reader, writer = await connect()
        writer.write(EXPECT)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        head, content = await said((reader, writer), b"12345" + CLOSE % b"b")
    assert b"connection: close" not in head
    assert content.count(b"HTTP/1.1 200 OK") == 1
