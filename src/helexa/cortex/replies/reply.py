"""Responses to clients: bytes are passed on as they arrive, and every response has a well-formed end."""

import orjson
from starlette.types import Send

from helexa.core.errors import ApiError
from helexa.core.sse import DONE, frame
from helexa.http.connections.request_head import Headers

MAX_HELD_BYTES = 64 << 10


class Reply:
    """One response to a client.

    An event stream is passed on line by line: if a chunk ends within a line, its rest is held until the line is
    complete. Holding the rest adds no delay, because clients cannot use a partial line, and lets an error event follow
    at any time.

    Attributes:
        headers: the gateway's own headers, sent with every status line.
        started: True once the status line was sent, so that only the body can follow.
    """

    def __init__(self, send: Send) -> None:
        self.headers: Headers = []
        self.started = False
        self._send = send
        self._streamed = False
        self._held = b""
        self._last = b""

    async def start(self, status: int, headers: Headers, *, streamed: bool) -> None:
        """Send status and headers. `streamed` states that the body is an event stream."""
        self.started = True
        self._streamed = streamed
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers]})

    async def write(self, chunk: bytes) -> None:
        """Pass the next bytes on."""
        if self._streamed and (self._held or not chunk.endswith(b"\n")):
            chunk = self._whole_lines(chunk)
        if chunk:
            self._last = (self._last + chunk)[-3:] if len(chunk) < 3 else chunk[-3:]
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, chunk: bytes = b"") -> None:
        """End a complete response with these bytes."""
        await self._send({"type": "http.response.body", "body": self._held + chunk, "more_body": False})

    async def abort(self, error: ApiError) -> None:
        """End with an error.

        If the status line was not sent, the error becomes an error response. A stream gets an error event. Any other
        response ends with a closed connection.
        """
        if not self.started:
            body = self.refusal(error)
            headers = [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
            headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await self.start(error.status, headers, streamed=False)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        elif self._streamed:
            end_of_event = b"" if self._last.endswith((b"\n\n", b"\n\r\n")) or not self._last else b"\n\n"
            body = end_of_event + self.failure(error)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def refusal(self, error: ApiError) -> bytes:
        """Return the body of an error response."""
        return orjson.dumps(error.envelope())

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a failed stream."""
        return frame(orjson.dumps(error.envelope())) + DONE

    def _whole_lines(self, chunk: bytes) -> bytes:
        buffered = self._held + chunk
        line_end = buffered.rfind(b"\n") + 1 if len(buffered) <= MAX_HELD_BYTES else len(buffered)
        self._held = buffered[line_end:]
        return buffered[:line_end]
