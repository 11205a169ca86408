"""Constants and helpers that all server-sent event streams share."""

from starlette.types import Receive

KEEP_ALIVE_SECONDS = 1.0
"""Seconds without an event after which a stream sends a comment."""

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
