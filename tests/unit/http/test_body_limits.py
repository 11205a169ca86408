"""Limits on the memory and the duration of request bodies."""

import asyncio
from typing import Any

import pytest

from helexa.core.errors import ApiError
from helexa.http import request_cycle_and_disconnects
from helexa.http.request_cycle_and_disconnects import BODY_SECS, MAX_EXTRA_BODY_SECS, body_secs
from helexa.http.service_and_memory_budget import BodyBudget
from http_listener import Streams, body, eventually, listening, start

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


async def size_of_body(scope: Any, receive: Any, send: Any) -> None:
    """Respond with the size of the request body, and with the status of the error if reading it fails."""
    size, more, status = 0, True, 200
    try:
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size, more = size + len(message["body"]), message["more_body"]
    except ApiError as error:
        status = error.status
        assert error.retry_after is not None
    except TimeoutError:
        status = 408
    content = b"%d" % size
    await send({**start((b"content-length", b"%d" % len(content))), "status": status})
    await send(body(content))


async def response_size(streams: Streams, request: bytes) -> tuple[int, int]:
    """Send `request`; return the response's status and the body size that the application counted."""
    streams[1].write(request)
    head = await streams[0].readuntil(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
    return int(head.split()[1]), int(await streams[0].readexactly(length))


async def test_content_length_is_reserved_in_the_body_budget_before_the_body_arrives() -> None:
    bodies = BodyBudget(1000)
    async with listening(size_of_body, bodies=bodies, keep_alive_secs=1000) as (_, connect):
        first, second = await connect(), await connect()
        first[1].write(HEAD % 400)
        await eventually(lambda: bodies.reserved == 400)
        assert (await response_size(second, HEAD % 101 + bytes(101)))[0] == 503
        assert await response_size(second, HEAD % 100 + bytes(100)) == (
            200,
            100,
        )  # the rejected body is not parsed as a request
        assert await response_size(first, bytes(400)) == (200, 400)
        assert bodies.reserved == 0
        assert await response_size(second, HEAD % 500 + bytes(500)) == (200, 500)


async def test_chunked_body_is_reserved_in_the_body_budget_as_it_arrives() -> None:
    bodies = BodyBudget(1000)
    async with listening(size_of_body, bodies=bodies, keep_alive_secs=1000) as (_, connect):
        first, second = await connect(), await connect()
        first[1].write(CHUNKED + b"64\r\n" + bytes(100) + b"\r\n")
        await eventually(lambda: bodies.reserved == 100)
        second[1].write(CHUNKED + b"12c\r\n" + bytes(300) + b"\r\n")
        await eventually(lambda: bodies.reserved == 400)
        assert (await response_size(second, b"c8\r\n" + bytes(200) + b"\r\n"))[0] == 503
        await eventually(lambda: bodies.reserved == 100)
        assert await response_size(first, b"0\r\n\r\n") == (200, 100)
        assert await response_size(second, b"0\r\n\r\n" + HEAD % 5 + b"hello") == (200, 5)
    assert bodies.reserved == 0


async def test_reserved_body_bytes_are_released_when_the_client_disconnects() -> None:
    bodies = BodyBudget(1000)
    async with listening(size_of_body, bodies=bodies) as (_, connect):
        _, writer = await connect()
        writer.write(HEAD % 400 + bytes(10))
        await eventually(lambda: bodies.reserved == 400)
        writer.close()
        await eventually(lambda: bodies.reserved == 0)


async def test_body_bytes_stay_reserved_until_the_application_returns() -> None:
    returns = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await returns.wait()

    bodies = BodyBudget(1000)
    async with listening(application, bodies=bodies) as (_, connect):
        _, writer = await connect()
        writer.write(HEAD % 5 + b"hello")
        await eventually(lambda: bodies.reserved == 5)
        returns.set()
        await eventually(lambda: bodies.reserved == 0)


def test_one_client_address_gets_at_most_half_of_the_body_budget() -> None:
    bodies = BodyBudget(1000)
    bodies.reserve("a", 500)
    with pytest.raises(ApiError):
        bodies.reserve("a", 1)
    bodies.reserve("b", 400)
    with pytest.raises(ApiError):
        bodies.reserve("c", 101)
    bodies.reserve("c", 100)
    for address, size in (("a", 500), ("b", 400), ("c", 100)):
        bodies.release(address, size)
    assert bodies.reserved == 0
    bodies.reserve("a", 500)


def test_time_limit_of_a_body_upload_requires_a_higher_rate_for_larger_bodies() -> None:
    sizes = [0, 1, 1000, 10**5, 10**6, 5 * 10**6, 64 << 20, 1 << 30]
    secs = [body_secs(size) for size in sizes]
    assert secs == sorted(secs)
    assert secs[0] == BODY_SECS
    assert secs[-1] < BODY_SECS + MAX_EXTRA_BODY_SECS
    for size in sizes[:-1]:
        assert body_secs(size) > size / 125_000  # an uplink of 1 Mbit/s


async def test_body_uploaded_below_the_minimum_rate_gets_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_cycle_and_disconnects, "BODY_SECS", 0.2)
    monkeypatch.setattr(request_cycle_and_disconnects, "MAX_EXTRA_BODY_SECS", 0.01)
    async with listening(size_of_body) as (_, connect):
        reader, writer = await connect()
        writer.write(HEAD % 10**8)

        async def drip() -> None:
            while not writer.is_closing():
                writer.write(bytes(1000))
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408 ")
        dripping.cancel()
