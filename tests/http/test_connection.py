"""A listener with applications that do what they should not, and clients that do what they may; over raw sockets."""

import asyncio
from typing import Any

import orjson
import pytest

from helexa.core.errors import HelexaError
from helexa.http.connections import connection
from helexa.http.connections.client_disconnect import ClientGone, HangUp
from helexa.http.listener import Listener, bind
from listening import GET, OK, body, hello, listening, said, start


async def test_an_answer_without_a_length_is_in_chunks() -> None:
    async with listening(hello) as (_, connect):
        head, content = await said(await connect(), GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") % b"a")
    assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
    assert head.endswith(b" GMT\r\nx-a: b\r\nconnection: close\r\ntransfer-encoding: chunked")
    assert content == b"6\r\nhello \r\n2\r\n/a\r\n0\r\n\r\n"


async def test_who_speaks_http_1_0_knows_no_chunks() -> None:
    async with listening(hello) as (_, connect):
        head, content = await said(await connect(), b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert head.endswith(b"x-a: b\r\nconnection: close")
    assert content == b"hello /a"


async def test_who_asks_for_a_head_gets_no_body() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send(start((b"content-length", b"5")))
        await send(body(b"hello"))

    head = b"HEAD / HTTP/1.1\r\nHost: x\r\n%s\r\n"
    async with listening(answer) as (_, connect):
        _, rest = await said(await connect(), head % b"" + head % b"Connection: close\r\n")
    assert rest.startswith(b"HTTP/1.1 200 OK\r\n")
    assert rest.endswith(b"content-length: 5\r\nconnection: close\r\n\r\n")


async def test_answers_come_in_the_order_of_the_requests() -> None:
    running = 0

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        nonlocal running
        running += 1
        assert running == 1
        assert (await receive())["body"] == scope["path"][1:].encode()
        await asyncio.sleep(0)
        running -= 1
        await hello(scope, receive, send)

    numbers = [b"%d" % number for number in range(100)]
    async with listening(answer) as (_, connect):
        reader, writer = await connect()
        for number in numbers:
            head = b"POST /%s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (number, len(number))
            writer.write(head + number)
            await asyncio.sleep(0)  # most come while others wait
        for number in numbers:
            assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"/%s\r\n0\r\n\r\n" % number)


async def test_no_more_requests_are_read_than_may_wait() -> None:
    answered = asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await answered.wait()
        await hello(scope, receive, send)

    async with listening(answer) as (listener, connect):
        reader, writer = await connect()
        for number in range(1000):
            writer.write(GET % b"%d" % number)
            await writer.drain()
            await asyncio.sleep(0)
        (one,) = listener._service.connections
        assert 1 < len(one._calls) < 500
        answered.set()
        for number in range(1000):
            assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"/%d\r\n0\r\n\r\n" % number)


async def test_a_request_before_one_that_is_none_is_not_begun() -> None:
    heard: list[str] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        heard.append((await receive())["type"])

    async with listening(answer) as (_, connect):
        head, _ = await said(await connect(), GET % b"" + b"what?\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert heard == ["http.disconnect"]


async def test_no_more_is_read_than_is_taken() -> None:
    taken = asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await taken.wait()
        size = 0
        while (message := await receive())["more_body"]:
            size += len(message["body"])
        await send(OK)
        await send(body(b"%d" % (size + len(message["body"]))))

    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    size = 64 << 20
    async with listening(answer) as (_, connect):
        reader, writer = await connect()
        writer.write(head % size + bytes(size))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await writer.drain()
        taken.set()
        assert (await reader.read()).endswith(b"\r\n8\r\n%d\r\n0\r\n\r\n" % size)


async def test_no_more_is_written_than_is_taken() -> None:
    size, written = 1 << 20, 0
    blocked = asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        nonlocal written
        await send(start((b"content-length", b"%d" % (200 * size))))
        asyncio.get_running_loop().call_soon(blocked.set)  # which comes when the answer waits for the client
        for written in range(1, 201):
            await send(body(bytes(size), more=written < 200))

    async with listening(answer) as (_, connect):
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        await blocked.wait()
        assert written < 100
        assert len(await reader.read()) > 200 * size
        assert written == 200


HELD = b"POST /second HTTP/1.1\r\nHost: x\r\nContent-Length: 70000\r\n\r\n" + bytes(70000)


@pytest.mark.parametrize(
    "waiting", [b"", GET % b"second", b"GET /second HTTP/1.1\r\nHost:", GET % b"more" * 17, HELD], ids=range(5)
)
async def test_a_hang_up_ends_what_is_under_way(waiting: bytes) -> None:
    outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    begun = asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"] == "/first"
        assert (await receive())["more_body"] is False
        try:
            with scope["extensions"][HangUp.NAME]:
                begun.set()
                await asyncio.Event().wait()
        except ClientGone:
            task = asyncio.current_task()
            assert task is not None
            outcome.set_result(f"{(await receive())['type']} {task.cancelling()}")
            await send(OK)  # to nobody

    async with listening(answer) as (_, connect):
        _, writer = await connect()
        writer.write(GET % b"first")
        await begun.wait()
        writer.write(waiting)
        await writer.drain()
        writer.close()
        assert await outcome == "http.disconnect 0"


async def test_a_hang_up_is_noticed_by_who_waits_for_the_body() -> None:
    outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"a"
        outcome.set_result((await receive())["type"])

    async with listening(answer) as (_, connect):
        _, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\na")
        await writer.drain()
        writer.close()
        assert await outcome == "http.disconnect"


async def refuse_to(*messages: dict[str, Any]) -> tuple[bytes, bytes]:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    async with listening(answer) as (_, connect):
        return await said(await connect(), GET % b"" * 2)


FAULTS = {
    "nothing": [],
    "a line break in a header": [start((b"x-a", b"b\r\nx-c: d"))],
    "another one": [start((b"x-a", b"b\nx-c: d"))],
    "half a line break": [start((b"x-a", b"b\r"))],
    "NUL": [start((b"x-a", b"b\0"))],
    "framing": [start((b"transfer-encoding", b"chunked"))],
    "a body first": [body(b"a")],
    "no such status": [{**OK, "status": 999}],
    "a status that is no answer's": [{**OK, "status": 101}],
    "a length that is none": [start((b"content-length", b"x"))],
}


@pytest.mark.parametrize("messages", FAULTS.values(), ids=FAULTS)
async def test_a_faulty_application_is_an_error_in_the_envelope(messages: list[dict[str, Any]]) -> None:
    head, content = await refuse_to(*messages)
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"connection: close" in head
    assert orjson.loads(content)["error"]["type"] == "api_error"


BROKEN = {
    "no end": [OK, body(b"abc", more=True)],
    "two heads": [OK, body(b"abc", more=True), OK],
    "too short": [start((b"content-length", b"4")), body(b"abc", more=True), body(b"")],
    "too long": [start((b"content-length", b"3")), body(b"abc", more=True), body(b"d")],
}


@pytest.mark.parametrize("messages", BROKEN.values(), ids=BROKEN)
async def test_an_answer_that_breaks_off_ends_the_connection(messages: list[dict[str, Any]]) -> None:
    head, content = await refuse_to(*messages)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert content in (b"abc", b"3\r\nabc\r\n")


async def test_who_is_idle_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECS", 1000.0)
    async with listening(hello, keep_alive_secs=0.05) as (_, connect):
        assert (await said(await connect(), GET % b"a"))[1].endswith(b"0\r\n\r\n")


async def test_idle_connections_are_kept_longer_than_reverse_proxies_keep_them() -> None:
    async with listening(hello) as (listener, _):
        assert listener._service.keep_alive_secs > 60


async def test_the_end_waits_for_answers_and_for_nobody_else() -> None:
    asked, answered = asyncio.Event(), asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        await answered.wait()
        await hello(scope, receive, send)

    async with listening(answer, grace_secs=100, keep_alive_secs=1000) as (listener, connect):
        idle, busy = await connect(), await connect()
        busy[1].write(GET % b"a")
        await asked.wait()
        listener.should_exit = True
        assert await idle[0].read() == b""
        with pytest.raises(ConnectionError):
            await connect()
        answered.set()
        assert (await busy[0].read()).endswith(b"/a\r\n0\r\n\r\n")


async def test_who_takes_too_long_at_the_end_is_cut_short() -> None:
    asked = asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with listening(answer, grace_secs=0.05) as (listener, connect):
        streams = await connect()
        streams[1].write(GET % b"a")
        await asked.wait()
        listener.should_exit = True
        head, content = await said(streams, b"")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert orjson.loads(content)["error"]["code"] == "shutting_down"


async def test_an_application_that_cannot_begin_is_not_served() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "lifespan.startup.failed", "message": "no database"})

    listener = Listener(app)
    with pytest.raises(HelexaError, match="no database"):
        await listener.serve(bind(("127.0.0.1", 0)))
    assert not listener.started
