"""Responses to clients: status, body in whole lines, keep-alives and errors."""

import re

import orjson
from starlette.types import Message, Send

from helexa.core.errors import ApiError
from helexa.core.sse import DONE, KEEP_ALIVE, frame
from helexa.http.headers import Headers

MAX_BUFFERED_BYTES = 64 << 10


class Reply:
    """One response to a client.

    An event stream is forwarded in whole lines. If a chunk ends within a line, the partial line is buffered until the
    line is complete or has `MAX_BUFFERED_BYTES`. The gateway can therefore send an error event after each chunk. This
    adds no visible delay, because clients cannot use a partial line.
    """

    def __init__(self, send: Send) -> None:
        self.headers: Headers = []  # headers that the gateway adds to the headers of the node's response
        self.started = False  # True once status and headers were sent to the client
        self.writes = 0  # number of times that bytes of the body were sent to the client
        self.finished = False  # True once the response has ended
        self._send = send
        self._streamed = False
        self._partial_line = b""
        self._last_bytes = b""

    async def start(self, status: int, headers: Headers, *, streamed: bool) -> None:
        """Send status and headers. `streamed` is True if the body is an event stream."""
        self.started = True
        self._streamed = streamed
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers]})

    async def write(self, chunk: bytes) -> None:
        """Send the next bytes of the body. In a stream, buffer a partial last line."""
        if self._streamed and (self._partial_line or not chunk.endswith(b"\n")):
            chunk = self._whole_lines(chunk)
        if chunk:
            self.writes += 1
            self._last_bytes = (self._last_bytes + chunk)[-3:] if len(chunk) < 3 else chunk[-3:]
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def keep_alive(self) -> None:
        """Send a comment in a stream, so that clients and proxies keep the connection."""
        if self._streamed:
            # `KEEP_ALIVE` ends with an empty line, which would end an event whose first lines were already sent.
            comment = KEEP_ALIVE if self._ends_with_event() else b":\n"
            await self._send({"type": "http.response.body", "body": comment, "more_body": True})

    async def finish(self, chunk: bytes = b"") -> None:
        """Send the last bytes to the client and end the response."""
        self.finished = True
        await self._send({"type": "http.response.body", "body": self._partial_line + chunk, "more_body": False})

    async def abort(self, error: ApiError) -> None:
        """End the response with an error.

        If no status was sent yet, the client gets an HTTP error response. In an event stream, the client gets an error
        event. Any other response that has started is left incomplete, so the server closes the connection.
        """
        if not self.started:
            body = self.error_body(error)
            headers = [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
            headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await self.start(error.status, headers, streamed=False)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        elif self._streamed:
            end_of_event = b"" if self._ends_with_event() else b"\n\n"
            body = end_of_event + self.failure(error)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def error_body(self, error: ApiError) -> bytes:
        """Return the body of an HTTP error response, for `abort`."""
        return orjson.dumps(error.envelope())

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that fails with `error`, for `abort`."""
        return frame(orjson.dumps(error.envelope())) + DONE

    def _ends_with_event(self) -> bool:
        return not self._last_bytes or self._last_bytes.endswith((b"\n\n", b"\n\r\n"))

    def _whole_lines(self, chunk: bytes) -> bytes:
        buffered = self._partial_line + chunk
        line_end = buffered.rfind(b"\n") + 1 if len(buffered) <= MAX_BUFFERED_BYTES else len(buffered)
        self._partial_line = buffered[line_end:]
        return buffered[:line_end]


_EVENT = re.compile(rb"^data:", re.MULTILINE)


class ResponseReply(Reply):
    """One response to a client of the Responses API."""

    # The events of a stream are counted, because an error event must contain the next sequence number.
    def __init__(self, send: Send) -> None:
        super().__init__(self._count_and_send)
        self._send_on = send
        self._events = 0

    async def _count_and_send(self, message: Message) -> None:
        self._events += len(_EVENT.findall(message.get("body", b"")))
        await self._send_on(message)

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails with `error`."""
        event = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
        return frame(orjson.dumps(event | {"sequence_number": self._events}), "error")
