"""Stream the progress of a model's load as server-sent events until the model is loaded or the load has failed."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from helexa.core.sse import KEEP_ALIVE, frame
from helexa.neuron.routes.event_stream import HEADERS, KEEP_ALIVE_SECONDS, disconnected

LOOK_SECONDS = 0.25


class LoadStream:
    """An ASGI response that streams `progress` events, and at the end of the load a `loaded` or `error` event.

    If the client disconnects, the stream ends but the load continues.

    Args:
        load: task that waits for the load. The stream cancels this task when it ends. Canceling the task must not
            cancel the load.
        progress: function that returns the data of a `progress` event, or None if the progress is unknown.
        outcome: function that returns the name and the data of the last event. It is called when `load` is done.
    """

    def __init__(
        self,
        load: asyncio.Task[Any],
        progress: Callable[[], dict[str, Any] | None],
        outcome: Callable[[], tuple[str, dict[str, Any]]],
    ) -> None:
        self._load = load
        self._progress = progress
        self._outcome = outcome

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send `progress` events until the load has ended, then the last event. Stop if the client disconnects."""
        disconnect = asyncio.create_task(disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            sent_progress, last_sent = None, time.monotonic()
            while not self._load.done():
                await asyncio.wait((self._load, disconnect), timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if disconnect.done():
                    return
                progress = self._progress()
                if progress is not None and progress != sent_progress:
                    sent_progress, last_sent = progress, time.monotonic()
                    await _write(send, frame(orjson.dumps(progress), "progress"))
                elif time.monotonic() - last_sent >= KEEP_ALIVE_SECONDS:
                    last_sent = time.monotonic()
                    await _write(send, KEEP_ALIVE)
            event, data = self._outcome()
            await _write(send, frame(orjson.dumps(data), event))
            await send({"type": "http.response.body", "body": b""})
        finally:
            disconnect.cancel()
            self._load.cancel()


async def _write(send: Send, frames: bytes) -> None:
    await send({"type": "http.response.body", "body": frames, "more_body": True})
