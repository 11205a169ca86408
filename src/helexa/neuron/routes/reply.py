"""Send the output of a run to the client, as a stream or as one body, until the run ends or the client disconnects."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import Receive, Scope, Send

from helexa.core.errors import ApiError, internal_error
from helexa.core.sse import KEEP_ALIVE
from helexa.neuron.events import Failed, InferenceEvent
from helexa.neuron.routes.error_response import log_error_response
from helexa.neuron.routes.event_stream import HEADERS, KEEP_ALIVE_SECONDS, disconnected
from helexa.neuron.routes.projectors.projector import Projector

FIRST_EVENT_SECONDS = 3.0
"""Seconds that a stream waits for the first event of its run before it sends the response headers with status 200.

A run that fails earlier gets a plain error response. A later error is sent as an event of the stream.
"""

logger = logging.getLogger(__name__)


class RunResponse:
    """An ASGI response that sends the output of a run as a stream of server-sent events or as one body.

    Nothing is sent before the first event of the run. If the run is rejected, the response can thus have an error
    status. But if a stream waits longer than `FIRST_EVENT_SECONDS` for the first event, it begins with a comment. A
    rejection after the comment is sent as an event. If the client disconnects, the run is canceled.
    """

    def __init__(self, events: AsyncGenerator[InferenceEvent, None], projector: Projector, *, stream: bool) -> None:
        self._events = events
        self._projector = projector
        self._streamed = stream  # a bound method here would be a reference cycle in every request
        self._arrived = time.monotonic()
        self._begun = False
        self._quiet_since: float | None = None  # time of the last bytes; None if no keep-alive may be sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response.

        Raises:
            ApiError: the run was rejected, or a run without streaming failed. In both cases nothing has been sent to
                the client.
        """
        send_reply = self._send_stream if self._streamed else self._send_body
        sender = asyncio.create_task(send_reply(scope["path"], send))
        disconnect = asyncio.create_task(disconnected(receive))
        try:
            while not sender.done() and not disconnect.done():
                await asyncio.wait((sender, disconnect), timeout=self._until_due(), return_when=asyncio.FIRST_COMPLETED)
                if not sender.done() and not disconnect.done() and self._until_due() <= 0:
                    await self._begin(send)
                    self._quiet_since = time.monotonic()
                    await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        finally:
            sender.cancel()
            disconnect.cancel()
            await asyncio.wait((sender, disconnect))
        try:
            if not sender.cancelled():
                sender.result()
        finally:
            del sender  # the task holds the error, whose traceback holds this frame: a reference cycle

    def _until_due(self) -> float:
        """Return the number of seconds until a stream must send its next keep-alive comment."""
        if self._quiet_since is not None:
            return self._quiet_since + KEEP_ALIVE_SECONDS - time.monotonic()
        if self._streamed and not self._begun:
            return self._arrived + FIRST_EVENT_SECONDS - time.monotonic()
        return KEEP_ALIVE_SECONDS

    async def _send_body(self, path: str, send: Send) -> None:
        async with aclosing(self._events):
            async for event in self._events:
                if isinstance(event, Failed):
                    raise event.error
                self._projector.take(event)
        body = self._projector.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, path: str, send: Send) -> None:
        async with aclosing(self._events):
            try:
                async for event in self._events:
                    await self._begin(send)
                    if isinstance(event, Failed):
                        log_error_response(path, event.error)
                    await self._write(event, send)
            except Exception as error:
                if not self._begun:
                    raise
                if isinstance(error, ApiError):
                    log_error_response(path, error)
                    await self._write(Failed(error), send)
                else:
                    logger.exception("stream failed path=%s error=%s", path, type(error).__name__)
                    await self._write(Failed(internal_error()), send)
        self._quiet_since = None
        await send({"type": "http.response.body", "body": b""})

    async def _begin(self, send: Send) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})

    async def _write(self, event: InferenceEvent, send: Send) -> None:
        frames = self._projector.frames(event)
        if frames:
            self._quiet_since = None  # no keep-alive inside a frame while the client is slow to read
            await send({"type": "http.response.body", "body": frames, "more_body": True})
        self._quiet_since = time.monotonic()
