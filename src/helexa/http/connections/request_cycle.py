"""Executes one request: passes its body to an ASGI application, and the application's response to the connection."""

import asyncio
import logging
from typing import Protocol

import orjson
from starlette.types import ASGIApp, Message, Scope

from helexa.core.errors import ApiError, internal_error, shutting_down
from helexa.http.connections.client_disconnect import DisconnectGuard
from helexa.http.connections.request_head import STATUS_LINES, Framing, Headers
from helexa.http.service import Service

log = logging.getLogger(__name__)

INTERIM = "helexa.interim"
"""Key in the `extensions` of the ASGI scope under which an application finds `RequestCycle.send_interim`."""

BODY_SECS = 60.0
MIN_RATE = 4096.0
MAX_EXTRA_BODY_SECS = 600.0

_BODILESS = frozenset({204, 304})


def body_secs(received: int) -> float:
    """Return the time limit in seconds for receiving `received` bytes of a request body.

    The limit is `BODY_SECS` + `received` / rate. The rate is `MIN_RATE` bytes per second for small bodies. It rises
    with the size of the body, and the limit always stays below `BODY_SECS` + `MAX_EXTRA_BODY_SECS`. Examples:

    * 500 kB: 2.7 minutes (0.03 Mbit/s)
    * 5 MB: 7.7 minutes (0.09 Mbit/s)
    * 64 MB: 11 minutes (0.8 Mbit/s)
    """
    return BODY_SECS + received / (MIN_RATE + received / MAX_EXTRA_BODY_SECS)


class CycleTransport(Protocol):
    """The methods and attributes of a connection that a `RequestCycle` uses.

    Attributes:
        address: IP address of the client.
        writable: None if more data may be sent now. Otherwise an event that is set as soon as more data may be sent.
        service: state that all connections of the server share.
    """

    address: str
    writable: asyncio.Event | None
    service: Service

    def write(self, data: bytes) -> None:
        """Send `data` to the client."""
        ...

    def body_consumed(self, size: int) -> None:
        """Notify the connection that the application has received `size` bytes of a request body."""
        ...

    def response_done(self, cycle: "RequestCycle") -> None:
        """Notify the connection that the response of `cycle` is complete."""
        ...

    def end(self) -> None:
        """Send buffered data, then close the connection."""
        ...


class RequestCycle:
    """One request: buffers its body for the application, and sends the application's response.

    A response of unknown length is sent with chunked encoding. HTTP/1.0 does not have this encoding. A client with
    HTTP/1.0 therefore receives the plain response, and the end of the connection marks the end of the response.

    The connection is closed if the application fails during a response. It is also closed if a client that waits for
    `100 Continue` receives a final response, because the server cannot know whether the client will still send the
    body.

    Attributes:
        keep_alive: True if the connection stays open for another request.
        disconnect: state that tells whether the client has disconnected.
        started: True once the response's head has been sent.
        complete: True once the whole response has been sent.
    """

    __slots__ = (
        "_body_incomplete",
        "_chunked",
        "_chunks",
        "_event",
        "_expects",
        "_has_event",
        "_is_head",
        "_length",
        "_received",
        "_remaining_length",
        "_reserved",
        "_size",
        "_speaks_1_1",
        "_transport",
        "_waited",
        "complete",
        "disconnect",
        "keep_alive",
        "started",
    )

    def __init__(
        self,
        transport: CycleTransport,
        disconnect: DisconnectGuard,
        framing: Framing,
        *,
        is_head: bool,
        speaks_1_1: bool,
        keep_alive: bool,
    ) -> None:
        self._transport = transport
        self._length, self._expects = framing
        self._reserved = 0  # bytes of the body budget
        self._is_head = is_head
        self._speaks_1_1 = speaks_1_1
        self.keep_alive = keep_alive
        self.disconnect = disconnect
        self.started = False
        self.complete = False
        self._chunks: list[bytes] = []
        self._size = 0
        self._received = 0
        self._waited = 0.0
        self._body_incomplete = True
        self._has_event = False
        self._event: asyncio.Event | None = None  # created only for a task that waits
        self._chunked = False
        self._remaining_length: int | None = None

    @property
    def missing_bytes(self) -> int:
        """Number of bytes of the request body that have not arrived. 0 if the request's head declares no length."""
        return max(0, (self._length or 0) - self._received)

    def feed(self, chunk: bytes) -> int:
        """Append `chunk` to the received request body.

        If the response is already complete, drop the bytes instead.

        Returns:
            Number of bytes that were buffered for the application. 0 if the bytes were dropped.
        """
        self._received += len(chunk)
        if self.complete:
            return 0
        self._chunks.append(chunk)
        self._size += len(chunk)
        self._wake_receiver()
        return len(chunk)

    def feed_end(self) -> None:
        """Record that the whole request body has arrived."""
        self._body_incomplete = False
        self._wake_receiver()

    def client_gone(self) -> None:
        """Record that the client has disconnected, and cancel work that the application has marked as cancelable."""
        self.disconnect.mark_gone()
        self._wake_receiver()

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Run the ASGI application for this request.

        If the application fails, is canceled, or returns before the response is complete, send an error or close the
        connection.
        """
        tasks = self._transport.service.tasks
        task = self.disconnect.task
        error: ApiError | None = None
        try:
            await app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            error = shutting_down()
        except Exception:
            log.exception("unexpected error in the application")
        finally:
            if task is not None:
                tasks.discard(task)
            if self._reserved:
                self._transport.service.bodies.release(self._transport.address, self._reserved)
                self._reserved = 0
        if not self.complete and not self.disconnect.gone:
            self._break_off(error or internal_error())

    async def receive(self) -> Message:
        """Return the next bytes of the request body as an ASGI message.

        If the client has disconnected or the response is complete, return an `http.disconnect` message instead.

        This method reserves memory for the body in the server's `BodyBudget`. If the request declares the length of its
        body, the first call reserves memory for the whole body. Otherwise each call reserves memory for the bytes that
        have arrived. The memory is released when the application returns.

        Raises:
            ApiError: status 503, if the memory limit for request bodies is exceeded.
            TimeoutError: no data arrived for `BODY_SECS`, or the body took longer than `body_secs` allows.
        """
        if (size := self._length or self._received) > self._reserved:
            self._reserve(size)
        if self._expects and not self.disconnect.gone:
            self._expects = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self._has_event or self.complete or self.disconnect.gone):
            if self._event is None:
                self._event = asyncio.Event()
            self._event.clear()
            await self._wait(self._event)
        if self.complete or self.disconnect.gone:
            return {"type": "http.disconnect"}
        self._has_event = False
        if self._received > self._reserved:
            self._reserve(self._received)
        return {"type": "http.request", "body": self._take_chunks(), "more_body": self._body_incomplete}

    async def send(self, message: Message) -> None:
        """Send an ASGI message of the application: the response's head, or the next bytes of the response body.

        Messages are dropped if the client has disconnected.

        Raises:
            RuntimeError: the message is not allowed at this point of the response, or its headers or length are
                invalid.
        """
        if self._transport.writable is not None:
            await self._transport.writable.wait()
        if self.disconnect.gone:
            return
        kind = message["type"]
        if kind == "http.response.body" and self.started and not self.complete:
            self._write(message.get("body", b""), message.get("more_body", False))
        elif kind == "http.response.start" and not self.started:
            self._start(message["status"], list(message.get("headers", ())))
        else:
            raise RuntimeError(f"unexpected message {kind} at this point of the response")

    def send_interim(self) -> bool:
        """Send the interim response `102 Processing`, which shows that the request is still being processed.

        Nothing is sent while the client is slow to read or waits for `100 Continue`.

        Returns:
            True if the caller may send another interim response later. False if the response has begun, the client has
                disconnected, or the client does not support HTTP/1.1.
        """
        if self.started or self.disconnect.gone or not self._speaks_1_1:
            return False
        if not self._expects and self._transport.writable is None:
            self._transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        return True

    def _reserve(self, size: int) -> None:
        if not self.started:
            self._transport.service.bodies.reserve(self._transport.address, size - self._reserved)
            self._reserved = size

    async def _wait(self, event: asyncio.Event) -> None:
        if not self._body_incomplete:
            await event.wait()
            return
        time = asyncio.get_running_loop().time
        started_at = time()
        async with asyncio.timeout(min(BODY_SECS, body_secs(self._received) - self._waited)):
            await event.wait()
        self._waited += time() - started_at

    def _start(self, status: int, headers: Headers) -> None:
        line = STATUS_LINES[status]
        if self._expects and self._body_incomplete:
            self.keep_alive = False  # the client may or may not send the body, so the next bytes are ambiguous
        lines = list(map(b": ".join, headers))
        remaining_length: int | None = None
        chunked = False
        for name, value in headers:
            if name == b"content-length":
                remaining_length = int(value)
            elif name == b"connection" or name == b"transfer-encoding":
                raise RuntimeError(f"the application must not set the header {name.decode()}; the server sets it")
        if not self.keep_alive:
            lines.append(b"connection: close")
        if self._is_head or status in _BODILESS:
            remaining_length = 0
        elif remaining_length is None and self._speaks_1_1:
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
            raise RuntimeError("a header contains a line break or NUL")
        self.started = True
        self._expects = False
        self._remaining_length, self._chunked = remaining_length, chunked
        self._transport.write(b"%b%b%b\r\n" % (line, self._transport.service.date(), header_block))

    def _write(self, body: bytes, more: bool) -> None:
        if self._chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                chunk += b"0\r\n\r\n"
            if chunk:
                self._transport.write(chunk)
        elif not self._is_head:
            if self._remaining_length is not None:
                self._remaining_length -= len(body)
                if self._remaining_length < 0 or (self._remaining_length and not more):
                    raise RuntimeError("the length of the body differs from content-length")
            if body:
                self._transport.write(body)
        if not more:
            self._take_chunks()
            self.complete = True
            self._wake_receiver()
            self._transport.response_done(self)

    def _take_chunks(self) -> bytes:
        chunks, size = self._chunks, self._size
        if not chunks:
            return b""
        self._chunks, self._size = [], 0
        self._transport.body_consumed(size)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _wake_receiver(self) -> None:
        self._has_event = True
        if self._event is not None:
            self._event.set()

    def _break_off(self, error: ApiError) -> None:
        if not self.started:
            self.keep_alive = False
            body = orjson.dumps(error.envelope())
            length = (b"content-length", b"%d" % len(body))
            self._start(error.status, [(b"content-type", b"application/json"), length])
            self._transport.write(b"" if self._is_head else body)
        self._take_chunks()
        self._transport.end()
