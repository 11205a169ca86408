"""Responses to clients. The node's bytes are forwarded as they arrive. A failed response ends with an error."""

import orjson
from starlette.types import Send

from helexa.core.errors import ApiError
from helexa.core.sse import DONE, frame
from helexa.http.connections.request_head import Headers

MAX_BUFFERED_BYTES = 64 << 10


class Reply:
    """One response to a client.

    An event stream is forwarded in whole lines. If a chunk ends within a line, the partial line is buffered until the
    line is complete. The gateway can therefore send an error event after each chunk. This adds no visible delay,
    because clients cannot use a partial line.

    Attributes:
        headers: headers that the gateway adds to the headers of the node's response.
        started: True once status and headers were sent to the client.
    """

    def __init__(self, send: Send) -> None:
        self.headers: Headers = []
        self.started = False
        self._send = send
        self._streamed = False
        self._partial_line = b""
        self._last_bytes = b""

    async def start(self, status: int, headers: Headers, *, streamed: bool) -> None:
        """Send status and headers to the client. `streamed` is True if the body is an event stream."""
        self.started = True
        self._streamed = streamed
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers]})

    async def write(self, chunk: bytes) -> None:
        """Send the next bytes of the response body to the client. In a stream, buffer a partial last line."""
        if self._streamed and (self._partial_line or not chunk.endswith(b"\n")):
            chunk = self._whole_lines(chunk)
        if chunk:
            self._last_bytes = (self._last_bytes + chunk)[-3:] if len(chunk) < 3 else chunk[-3:]
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, chunk: bytes = b"") -> None:
        """Send the last bytes to the client and end the response."""
        await self._send({"type": "http.response.body", "body": self._partial_line + chunk, "more_body": False})

    async def abort(self, error: ApiError) -> None:
        """End the response with an error.

        If no status was sent yet, send an HTTP error response. If an event stream has started, send an error event. Any
        other started response is left incomplete, so the server closes the connection.
        """
        if not self.started:
            body = self.error_body(error)
            headers = [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
            headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await self.start(error.status, headers, streamed=False)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        elif self._streamed:
            end_of_event = b"" if self._last_bytes.endswith((b"\n\n", b"\n\r\n")) or not self._last_bytes else b"\n\n"
            body = end_of_event + self.failure(error)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def error_body(self, error: ApiError) -> bytes:
        """Return the body of an HTTP error response. Used if `abort` is called before a status was sent."""
        return orjson.dumps(error.envelope())

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that fails with `error`.

        Used if `abort` is called after a stream started.
        """
        return frame(orjson.dumps(error.envelope())) + DONE

    def _whole_lines(self, chunk: bytes) -> bytes:
        buffered = self._partial_line + chunk
        line_end = buffered.rfind(b"\n") + 1 if len(buffered) <= MAX_BUFFERED_BYTES else len(buffered)
        self._partial_line = buffered[line_end:]
        return buffered[:line_end]
