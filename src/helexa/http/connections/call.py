"""One request and its response, between a connection and an ASGI application."""

import asyncio
import logging
from typing import Protocol

import orjson
from starlette.types import ASGIApp, Message, Scope

from helexa.core.errors import ApiError, internal_error, shutting_down
from helexa.http.connections.client_disconnect import HangUp
from helexa.http.connections.request_head import STATUS_LINES, Framing, Headers
from helexa.http.service import Service

log = logging.getLogger(__name__)

INTERIM = "helexa.interim"
"""Key in a scope's `extensions` of the function that sends an interim response, `Call.send_interim`."""

BODY_SECS = 60.0
MIN_RATE = 4096.0
LONGEST_BODY_SECS = 600.0

_BODILESS = frozenset({204, 304})


def body_secs(received: int) -> float:
    """Return the seconds that a body may take until `received` bytes have come.

    A minimum rate applies beyond the first `BODY_SECS`. The rate rises with the size, from `MIN_RATE` bytes per second,
    so that a body of any size ends within `BODY_SECS` + `LONGEST_BODY_SECS`: 500 kB may take 2.7 minutes (0.03 Mbit/s),
    5 MB 7.7 minutes (0.09 Mbit/s) and 64 MB 11 minutes (0.8 Mbit/s).
    """
    return BODY_SECS + received / (MIN_RATE + received / LONGEST_BODY_SECS)


class CallTransport(Protocol):
    """A call's interface to its connection.

    Attributes:
        address: the client's host.
        room: set once the client can receive more data; None while it can.
        service: state shared by all connections.
    """

    address: str
    room: asyncio.Event | None
    service: Service

    def write(self, data: bytes) -> None:
        """Send data."""
        ...

    def taken(self, size: int) -> None:
        """Record that the application has taken `size` bytes of a body."""
        ...

    def answered(self, call: "Call") -> None:
        """Record that a response is complete."""
        ...

    def end(self) -> None:
        """Send buffered data, then close the connection."""
        ...


class Call:
    """One request: the state of its body and its response.

    A client with HTTP/1.0 gets a response of unknown length up to the connection's end; other clients get chunks. A
    response that breaks off before its end closes the connection.

    If a client sends `Expect: 100-continue` and gets a final response instead of `100 Continue`, the connection closes,
    unless the body has arrived nevertheless.

    Attributes:
        keep_alive: another request may follow on the connection.
        hang_up: tells whether the client has disconnected.
        started: the response's head is sent.
        complete: the response is sent.
    """

    __slots__ = (
        "_chunked",
        "_event",
        "_expects",
        "_is_head",
        "_left",
        "_length",
        "_more",
        "_news",
        "_pieces",
        "_received",
        "_reserved",
        "_size",
        "_speaks_1_1",
        "_waited",
        "_way",
        "complete",
        "hang_up",
        "keep_alive",
        "started",
    )

    def __init__(
        self,
        way: CallTransport,
        hang_up: HangUp,
        framing: Framing,
        *,
        is_head: bool,
        speaks_1_1: bool,
        keep_alive: bool,
    ) -> None:
        self._way = way
        self._length, self._expects = framing
        self._reserved = 0  # bytes of the body budget
        self._is_head = is_head
        self._speaks_1_1 = speaks_1_1
        self.keep_alive = keep_alive
        self.hang_up = hang_up
        self.started = False
        self.complete = False
        self._pieces: list[bytes] = []
        self._size = 0
        self._received = 0
        self._waited = 0.0
        self._more = True
        self._news = False
        self._event: asyncio.Event | None = None  # created only for a task that waits
        self._chunked = False
        self._left: int | None = None

    @property
    def missing_bytes(self) -> int:
        """Bytes of the body that have not arrived; 0 if the head declares no length."""
        return max(0, (self._length or 0) - self._received)

    def feed(self, piece: bytes) -> int:
        """Add a piece of the body.

        Returns:
            Number of bytes held for the application; 0 if the response is already complete.
        """
        self._received += len(piece)
        if self.complete:
            return 0
        self._pieces.append(piece)
        self._size += len(piece)
        self._tell()
        return len(piece)

    def feed_end(self) -> None:
        """Mark the body as complete."""
        self._more = False
        self._tell()

    def lose(self) -> None:
        """Record that the client has disconnected."""
        self.hang_up.happen()
        self._tell()

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Run the application."""
        tasks = self._way.service.tasks
        task = self.hang_up.task
        error: ApiError | None = None
        try:
            await app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            error = shutting_down()
        except Exception:
            log.exception("a fault in the application")
        finally:
            if task is not None:
                tasks.discard(task)
            if self._reserved:
                self._way.service.bodies.release(self._way.address, self._reserved)
                self._reserved = 0
        if not self.complete and not self.hang_up.gone:
            self._break_off(error or internal_error())

    async def receive(self) -> Message:
        """Return the next piece of the body, or a disconnect message once the client is gone or the response is
        complete.

        The body's memory is reserved here and released when the application returns. A declared length is reserved at
        once, a chunked body as it arrives.

        Raises:
            ApiError: 503: the memory for bodies is used up.
            TimeoutError: no data arrived for `BODY_SECS`, or the body takes longer than `body_secs` allows.
        """
        if (size := self._length or self._received) > self._reserved:
            self._reserve(size)
        if self._expects and not self.hang_up.gone:
            self._expects = False
            self._way.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self._news or self.complete or self.hang_up.gone):
            if self._event is None:
                self._event = asyncio.Event()
            self._event.clear()
            await self._wait(self._event)
        if self.complete or self.hang_up.gone:
            return {"type": "http.disconnect"}
        self._news = False
        if self._received > self._reserved:
            self._reserve(self._received)
        return {"type": "http.request", "body": self._take(), "more_body": self._more}

    async def send(self, message: Message) -> None:
        """Send the response's head or the next piece of its body. Ignored if the client is gone.

        Raises:
            RuntimeError: the message is out of order, or would break the response's framing.
        """
        if self._way.room is not None:
            await self._way.room.wait()
        if self.hang_up.gone:
            return
        kind = message["type"]
        if kind == "http.response.body" and self.started and not self.complete:
            self._write(message.get("body", b""), message.get("more_body", False))
        elif kind == "http.response.start" and not self.started:
            self._start(message["status"], list(message.get("headers", ())))
        else:
            raise RuntimeError(f"{kind} is not what an answer goes on with")

    def send_interim(self) -> bool:
        """Send `102 Processing`, which tells the client that the response is still being made.

        Returns:
            Whether another interim response may follow: False once the response has begun or the client is gone.
        """
        if self.started or self.hang_up.gone or not self._speaks_1_1:
            return False
        if not self._expects and self._way.room is None:
            self._way.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        return True

    def _reserve(self, size: int) -> None:
        if not self.started:
            self._way.service.bodies.reserve(self._way.address, size - self._reserved)
            self._reserved = size

    async def _wait(self, event: asyncio.Event) -> None:
        if not self._more:
            await event.wait()
            return
        time = asyncio.get_running_loop().time
        started_at = time()
        async with asyncio.timeout(min(BODY_SECS, body_secs(self._received) - self._waited)):
            await event.wait()
        self._waited += time() - started_at

    def _start(self, status: int, headers: Headers) -> None:
        line = STATUS_LINES[status]
        if self._expects and self._more:
            self.keep_alive = False  # the client may or may not send the body, so the next bytes are ambiguous
        lines = list(map(b": ".join, headers))
        bytes_left: int | None = None
        chunked = False
        for name, value in headers:
            if name == b"content-length":
                bytes_left = int(value)
            elif name == b"connection" or name == b"transfer-encoding":
                raise RuntimeError(f"{name.decode()} is the server's")
        if not self.keep_alive:
            lines.append(b"connection: close")
        if self._is_head or status in _BODILESS:
            bytes_left = 0
        elif bytes_left is None and self._speaks_1_1:
            chunked = True
            lines.append(b"transfer-encoding: chunked")
        lines.append(b"")
        header_block = b"\r\n".join(lines)
        line_breaks = len(lines) - 1
        if (
            header_block.count(b"\n") != line_breaks
            or header_block.count(b"\r") != line_breaks
            or b"\0" in header_block
        ):
            raise RuntimeError("a header with a line break")
        self.started = True
        self._expects = False
        self._left, self._chunked = bytes_left, chunked
        self._way.write(b"%b%b%b\r\n" % (line, self._way.service.date(), header_block))

    def _write(self, body: bytes, more: bool) -> None:
        if self._chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                chunk += b"0\r\n\r\n"
            if chunk:
                self._way.write(chunk)
        elif not self._is_head:
            if self._left is not None:
                self._left -= len(body)
                if self._left < 0 or (self._left and not more):
                    raise RuntimeError("a body of another length than its head says")
            if body:
                self._way.write(body)
        if not more:
            self._take()
            self.complete = True
            self._tell()
            self._way.answered(self)

    def _take(self) -> bytes:
        chunks, size = self._pieces, self._size
        if not chunks:
            return b""
        self._pieces, self._size = [], 0
        self._way.taken(size)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _tell(self) -> None:
        self._news = True
        if self._event is not None:
            self._event.set()

    def _break_off(self, error: ApiError) -> None:
        if not self.started:
            self.keep_alive = False
            body = orjson.dumps(error.envelope())
            length = (b"content-length", b"%d" % len(body))
            self._start(error.status, [(b"content-type", b"application/json"), length])
            self._way.write(b"" if self._is_head else body)
        self._take()
        self._way.end()
