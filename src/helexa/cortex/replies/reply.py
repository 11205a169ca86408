"""The answer to a client: bytes as they come, and a well-formed end whatever happens."""

import orjson
from starlette.types import Send

from helexa.core.errors import ApiError
from helexa.core.sse import DONE, frame
from helexa.http.connections.request_head import Headers

MAX_HELD_BYTES = 64 << 10


class Reply:
    """One response on its way to the client.

    An event stream is passed on line by line: of a chunk that ends within a line the rest is held until the line is
    whole, which costs no time (nobody can use half a line) and lets an error event follow at any moment.

    Attributes:
        headers: the gateway's own, sent with every status line.
        started: the status line is sent, so that nothing but the body can follow.
    """

    def __init__(self, send: Send) -> None:
        self.headers: Headers = []
        self.started = False
        self._send = send
        self._streamed = False
        self._held = b""
        self._last = b""

    async def start(self, status: int, headers: Headers, *, streamed: bool) -> None:
        """Send status and headers; `streamed` says that the body is an event stream."""
        self.started = True
        self._streamed = streamed
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers]})

    async def write(self, chunk: bytes) -> None:
        """Pass on the next bytes."""
        if self._streamed and (self._held or not chunk.endswith(b"\n")):
            chunk = self._whole_lines(chunk)
        if chunk:
            self._last = (self._last + chunk)[-3:] if len(chunk) < 3 else chunk[-3:]
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, chunk: bytes = b"") -> None:
        """End a complete answer with these bytes."""
        await self._send({"type": "http.response.body", "body": self._held + chunk, "more_body": False})

    async def abort(self, error: ApiError) -> None:
        """End with an error: a refusal if nothing is sent yet, an event in a stream, else a closed connection."""
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
        """The body that carries an error."""
        return orjson.dumps(error.envelope())

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that cannot go on."""
        return frame(orjson.dumps(error.envelope())) + DONE

    def _whole_lines(self, chunk: bytes) -> bytes:
        held = self._held + chunk
        cut = held.rfind(b"\n") + 1 if len(held) <= MAX_HELD_BYTES else len(held)
        self._held = held[cut:]
        return held[:cut]
