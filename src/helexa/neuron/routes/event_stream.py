"""Constants and functions for streams of server-sent events."""

from starlette.types import Receive

KEEP_ALIVE_SECONDS = 1.0
"""Seconds without an event after which a stream sends a keep-alive comment."""

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def disconnected(receive: Receive) -> None:
    """Wait until the client closes its connection. `receive` is the ASGI function of the request."""
    while (await receive())["type"] != "http.disconnect":
        pass
