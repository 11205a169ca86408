"""A running listener with a test's ASGI application, and raw clients of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from helexa.http.listener import Listener, bind

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Application = Callable[[Any, Any, Any], Awaitable[None]]

GET = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"
OK = {"type": "http.response.start", "status": 200, "headers": []}


def body(content: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


def start(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {**OK, "headers": list(headers)}


class Clients:
    """Opens connections to a listener when called; `close` closes all of them."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self._writers: list[asyncio.StreamWriter] = []

    async def __call__(self) -> Streams:
        reader, writer = await asyncio.open_connection(*self.address)
        self._writers.append(writer)
        return reader, writer

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def listening(application: Application, **options: Any) -> AsyncIterator[tuple[Listener, Clients]]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await application(scope, receive, send)
            return
        for _ in range(2):
            await send({"type": (await receive())["type"] + ".complete"})

    listener, bound = Listener(app, **options), bind(("127.0.0.1", 0))
    connect = Clients(bound.getsockname())
    serving = asyncio.create_task(listener.serve(bound))
    try:
        async with asyncio.timeout(60):
            yield listener, connect
    finally:
        connect.close()
        listener.should_exit = True
        await serving


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send(start((b"x-a", b"b")))
    await send(body(b"hello ", more=True))
    await send(body(b"", more=True))
    await send(body(scope["path"].encode()))


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds; raise TimeoutError after 60 seconds."""
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


async def final_response(streams: Streams, request: bytes) -> tuple[bytes, bytes]:
    """Send `request` and read until the connection closes; return the response's head and body."""
    streams[1].write(request)
    head, _, content = (await streams[0].read()).partition(b"\r\n\r\n")
    return head, content
