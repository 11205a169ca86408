"""HTTP connections over raw sockets: framing, pipelining, backpressure, disconnects, faulty applications."""

import asyncio
from typing import Any

import orjson
import pytest

from helexa.core.errors import HelexaError
from helexa.http import connection_and_timeouts
from helexa.http.listener import Listener, bind
from helexa.http.request_cycle_and_disconnects import ClientDisconnected, DisconnectGuard
from http_listener import GET, OK, body, final_response, hello, listening, start


async def test_response_without_a_length_is_chunked() -> None:
    async with listening(hello) as (_, connect):
        head, content = await final_response(
            await connect(), GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") % b"a"
        )
    assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
    assert head.endswith(b" GMT\r\nx-a: b\r\nconnection: close\r\ntransfer-encoding: chunked")
    assert content == b"6\r\nhello \r\n2\r\n/a\r\n0\r\n\r\n"


async def test_http_1_0_response_is_not_chunked() -> None:
    async with listening(hello) as (_, connect):
        head, content = await final_response(await connect(), b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert head.endswith(b"x-a: b\r\nconnection: close")
    assert content == b"hello /a"


async def test_head_request_gets_no_body() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send(start((b"content-length", b"5")))
        await send(body(b"hello"))

    head = b"HEAD / HTTP/1.1\r\nHost: x\r\n%s\r\n"
    async with listening(application) as (_, connect):
        _, remaining = await final_response(await connect(), head % b"" + head % b"Connection: close\r\n")
    assert remaining.startswith(b"HTTP/1.1 200 OK\r\n")
    assert remaining.endswith(b"content-length: 5\r\nconnection: close\r\n\r\n")


async def test_pipelined_responses_are_in_request_order() -> None:
    running = 0

    async def application(scope: Any, receive: Any, send: Any) -> None:
        nonlocal running
        running += 1
        assert running == 1
        assert (await receive())["body"] == scope["path"][1:].encode()
        await asyncio.sleep(0)
        running -= 1
        await hello(scope, receive, send)

    numbers = [b"%d" % number for number in range(100)]
    async with listening(application) as (_, connect):
        reader, writer = await connect()
        for number in numbers:
            head = b"POST /%s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (number, len(number))
            writer.write(head + number)
            await asyncio.sleep(0)  # most requests arrive while earlier ones wait
        for number in numbers:
            assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"/%s\r\n0\r\n\r\n" % number)


async def test_server_parses_fewer_than_500_of_1000_pipelined_requests_ahead() -> None:
    released = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await released.wait()
        await hello(scope, receive, send)

    async with listening(application) as (listener, connect):
        reader, writer = await connect()
        for number in range(1000):
            writer.write(GET % b"%d" % number)
            await writer.drain()
            await asyncio.sleep(0)
        (server_side,) = listener._service.connections
        assert 1 < len(server_side._cycles) < 500
        released.set()
        for number in range(1000):
            assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"/%d\r\n0\r\n\r\n" % number)


async def test_running_request_is_disconnected_if_a_malformed_request_follows() -> None:
    received: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        received.append((await receive())["type"])

    async with listening(application) as (_, connect):
        head, _ = await final_response(await connect(), GET % b"" + b"what?\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert received == ["http.disconnect"]


async def test_server_stops_reading_until_the_application_receives_the_body() -> None:
    reading = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await reading.wait()
        size = 0
        while (message := await receive())["more_body"]:
            size += len(message["body"])
        await send(OK)
        await send(body(b"%d" % (size + len(message["body"]))))

    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    size = 64 << 20
    async with listening(application) as (_, connect):
        reader, writer = await connect()
        writer.write(head % size + bytes(size))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await writer.drain()
        reading.set()
        assert (await reader.read()).endswith(b"\r\n8\r\n%d\r\n0\r\n\r\n" % size)


async def test_application_is_paused_in_sending_until_the_client_reads() -> None:
    size, written = 1 << 20, 0
    blocked = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        nonlocal written
        await send(start((b"content-length", b"%d" % (200 * size))))
        asyncio.get_running_loop().call_soon(blocked.set)  # runs when `send` waits for the client
        for written in range(1, 201):
            await send(body(bytes(size), more=written < 200))

    async with listening(application) as (_, connect):
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        await blocked.wait()
        assert written < 100
        assert len(await reader.read()) > 200 * size
        assert written == 200


UNREAD = b"POST /second HTTP/1.1\r\nHost: x\r\nContent-Length: 70000\r\n\r\n" + bytes(70000)


@pytest.mark.parametrize(
    "waiting", [b"", GET % b"second", b"GET /second HTTP/1.1\r\nHost:", GET % b"more" * 17, UNREAD], ids=range(5)
)
async def test_disconnect_of_the_client_cancels_the_running_request(waiting: bytes) -> None:
    outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    begun = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"] == "/first"
        assert (await receive())["more_body"] is False
        try:
            with scope["extensions"][DisconnectGuard.NAME]:
                begun.set()
                await asyncio.Event().wait()
        except ClientDisconnected:
            task = asyncio.current_task()
            assert task is not None
            outcome.set_result(f"{(await receive())['type']} {task.cancelling()}")
            await send(OK)  # discarded: the client is gone

    async with listening(application) as (_, connect):
        _, writer = await connect()
        writer.write(GET % b"first")
        await begun.wait()
        writer.write(waiting)
        await writer.drain()
        writer.close()
        assert await outcome == "http.disconnect 0"


async def test_application_that_waits_for_the_body_receives_a_disconnect() -> None:
    outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"a"
        outcome.set_result((await receive())["type"])

    async with listening(application) as (_, connect):
        _, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\na")
        await writer.drain()
        writer.close()
        assert await outcome == "http.disconnect"


async def refuse_to(*messages: dict[str, Any]) -> tuple[bytes, bytes]:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    async with listening(application) as (_, connect):
        return await final_response(await connect(), GET % b"" * 2)


FAULTS = {
    "nothing": [],
    "a line break in a header": [start((b"x-a", b"b\r\nx-c: d"))],
    "a line feed in a header": [start((b"x-a", b"b\nx-c: d"))],
    "a carriage return in a header": [start((b"x-a", b"b\r"))],
    "NUL": [start((b"x-a", b"b\0"))],
    "framing": [start((b"transfer-encoding", b"chunked"))],
    "a body first": [body(b"a")],
    "no such status": [{**OK, "status": 999}],
    "an informational status": [{**OK, "status": 101}],
    "a malformed length": [start((b"content-length", b"x"))],
    "no body after its length": [start((b"content-length", b"3"))],
    "more than the length at once": [start((b"content-length", b"3")), body(b"abcd")],
}


@pytest.mark.parametrize("messages", FAULTS.values(), ids=FAULTS)
async def test_invalid_asgi_message_of_the_application_becomes_a_500_response(messages: list[dict[str, Any]]) -> None:
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
async def test_response_that_the_application_breaks_off_closes_the_connection(messages: list[dict[str, Any]]) -> None:
    head, content = await refuse_to(*messages)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert content in (b"abc", b"3\r\nabc\r\n")


async def test_idle_connection_is_closed_after_the_keep_alive_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_and_timeouts, "HEAD_SECS", 1000.0)
    async with listening(hello, keep_alive_secs=0.05) as (_, connect):
        assert (await final_response(await connect(), GET % b"a"))[1].endswith(b"0\r\n\r\n")


async def test_default_keep_alive_time_is_longer_than_that_of_reverse_proxies() -> None:
    async with listening(hello) as (listener, _):
        assert listener._service.keep_alive_secs > 60


async def test_shutdown_waits_only_for_connections_with_running_requests() -> None:
    started, released = asyncio.Event(), asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        started.set()
        await released.wait()
        await hello(scope, receive, send)

    async with listening(application, grace_secs=100, keep_alive_secs=1000) as (listener, connect):
        idle, busy = await connect(), await connect()
        busy[1].write(GET % b"a")
        await started.wait()
        listener.should_exit = True
        assert await idle[0].read() == b""
        with pytest.raises(ConnectionError):
            await connect()
        released.set()
        assert (await busy[0].read()).endswith(b"/a\r\n0\r\n\r\n")


async def test_request_that_still_runs_after_the_grace_period_of_a_shutdown_gets_a_503() -> None:
    started = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    async with listening(application, grace_secs=0.05) as (listener, connect):
        streams = await connect()
        streams[1].write(GET % b"a")
        await started.wait()
        listener.should_exit = True
        head, content = await final_response(streams, b"")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert orjson.loads(content)["error"]["code"] == "shutting_down"


async def test_failed_startup_of_the_application_is_raised() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "lifespan.startup.failed", "message": "no database"})

    listener = Listener(app)
    with pytest.raises(HelexaError, match="no database"):
        await listener.serve(bind(("127.0.0.1", 0)))
    assert not listener.started
