"""Runs an ASGI application for one request, and sends its response."""

import asyncio
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Scope

from helexa.core.errors import ApiError, internal_error, shutting_down
from helexa.core.logs import quoted
from helexa.http.content_coding import BodyDecoder
from helexa.http.headers import Headers
from helexa.http.request_parser import STATUS_LINES, Framing
from helexa.http.service_and_memory_budget import OpenConnection


class ClientDisconnected(Exception):
    """The client of a request has disconnected."""


class DisconnectGuard:
    """Tells whether the client of a request has disconnected.

    It is stored in the ASGI scope as `extensions[DisconnectGuard.NAME]`. An application can use it as a context
    manager, in the task of the request: if the client disconnects or has disconnected, the code in the `with` block is
    canceled or not run, and `ClientDisconnected` is raised.
    """

    NAME = "helexa.disconnect"

    __slots__ = ("_watched", "gone", "task")

    def __init__(self) -> None:
        self.gone = False  # True if the client disconnected before the response was complete
        # Asyncio task of the request. Only this task may use the context manager.
        self.task: asyncio.Task[None] | None = None
        self._watched = False

    def mark_gone(self) -> None:
        """Set `gone`, and cancel the task if it is in the `with` block."""
        if self.gone:
            return
        self.gone = True
        if self._watched and self.task is not None:
            self.task.cancel()

    def __enter__(self) -> None:
        """Enter the `with` block, in which a disconnect of the client cancels the task."""
        if self.gone:
            raise ClientDisconnected
        self._watched = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the `with` block; raise `ClientDisconnected` if a disconnect canceled it."""
        self._watched = False
        if self.gone and self.task is not None and kind is asyncio.CancelledError:
            self.task.uncancel()
            raise ClientDisconnected from None


log = logging.getLogger(__name__)

# Key in the `extensions` of the ASGI scope under which an application finds `RequestCycle.send_interim`.
INTERIM = "helexa.interim"

# Key in the `extensions` of the ASGI scope. Its value is a function that returns whether the server is shutting down.
STOPPING = "helexa.stopping"

BODY_SECS = 60.0
MIN_RATE = 4096.0
MAX_EXTRA_BODY_SECS = 600.0

_BODILESS = frozenset({204, 304})


def body_secs(received: int) -> float:
    """Return the seconds within which `received` bytes of a body must arrive.

    The limit is `BODY_SECS` + `received` / rate. The rate is `MIN_RATE` bytes per second for small bodies. It rises
    with the size of the body, and the limit always stays below `BODY_SECS` + `MAX_EXTRA_BODY_SECS`. Examples:

    * 500 kB: 2.7 minutes (0.03 Mbit/s)
    * 5 MB: 7.7 minutes (0.09 Mbit/s)
    * 64 MB: 11 minutes (0.8 Mbit/s)
    """
    return BODY_SECS + received / (MIN_RATE + received / MAX_EXTRA_BODY_SECS)


class RequestCycle:
    """One request: buffers its body, runs the application, and sends the response.

    A response of unknown length is sent with chunked encoding. HTTP/1.0 does not have this encoding. A client with
    HTTP/1.0 therefore receives the plain response, and the end of the connection marks the end of the response.

    The connection is closed if the application fails during a response. It is also closed if a client that waits for
    `100 Continue` receives a final response, because the server cannot know whether the client will still send the
    body.
    """

    __slots__ = (
        "_body_incomplete",
        "_chunked",
        "_chunks",
        "_connection",
        "_decoded",
        "_decoder",
        "_event",
        "_expects",
        "_has_event",
        "_head",
        "_is_head",
        "_length",
        "_received",
        "_received_all",
        "_remaining_length",
        "_reserved",
        "_size",
        "_speaks_1_1",
        "_waited",
        "complete",
        "disconnect",
        "keep_alive",
        "started",
    )

    def __init__(
        self,
        connection: OpenConnection,
        disconnect: DisconnectGuard,
        framing: Framing,
        *,
        is_head: bool,
        speaks_1_1: bool,
        keep_alive: bool,
        decoder: BodyDecoder | None = None,
    ) -> None:
        self._connection = connection
        self._decoder = decoder
        self._decoded = 0  # bytes that the decoder has returned
        self._length, self._expects = framing
        self._reserved = 0  # bytes of the body budget
        self._is_head = is_head
        self._speaks_1_1 = speaks_1_1
        self.keep_alive = keep_alive  # True if the connection stays open for another request
        self.disconnect = disconnect  # state that tells whether the client has disconnected
        self.started = False  # True once the application has sent the response's head
        self.complete = False  # True once the whole response has been sent
        self._chunks: list[bytes] = []
        self._size = 0
        self._received = 0
        self._received_all = False
        self._waited = 0.0
        self._body_incomplete = True
        self._has_event = False
        self._event: asyncio.Event | None = None  # created only for a task that waits
        self._chunked = False
        self._remaining_length: int | None = None
        self._head = b""  # head of a response with a body, which waits for the first bytes of the body

    @property
    def missing_bytes(self) -> int:
        """Number of body bytes that have not arrived; 0 if no length was declared."""
        return max(0, (self._length or 0) - self._received)

    def feed(self, chunk: bytes) -> int:
        """Buffer bytes of the body, and return how many bytes were buffered.

        After the response is complete, bytes are dropped, and the result is 0.
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
        """Record that the client has disconnected; see `DisconnectGuard.mark_gone`."""
        self.disconnect.mark_gone()
        self._wake_receiver()

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Run the ASGI application for this request.

        If the application fails, is canceled, or returns before the response is complete, send an error or close the
        connection.
        """
        tasks = self._connection.service.tasks
        task = self.disconnect.task
        error: ApiError | None = None
        try:
            await app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            error = shutting_down()
        except Exception:
            log.exception(
                "request failed with an unexpected error path=%s; the client gets 500 or an incomplete response",
                quoted(scope.get("path", "")),
            )
        finally:
            if task is not None:
                tasks.discard(task)
            self._release(self._reserved)
        if not self.complete and not self.disconnect.gone:
            self._break_off(error or internal_error())

    def receive(self) -> Coroutine[Any, Any, Message]:
        """Return the next bytes of the decoded body as an ASGI message.

        If the client has disconnected or the response is complete, return an `http.disconnect` message instead.

        This method reserves memory for the body in the server's `BodyBudget`: the first call for the whole body if its
        length is declared, otherwise each call for the bytes that have arrived. The memory is released when the
        application returns.

        Raises:
            ApiError: status 503, if the memory limit for request bodies is exceeded. 400, if a compressed body is
                invalid.
            TimeoutError: no data arrived for `BODY_SECS`, or the body took longer than `body_secs` allows.
        """
        # no `await` here: it would cost one more coroutine frame per request
        return self._receive() if self._decoder is None else self._receive_decoded(self._decoder)

    async def _receive_decoded(self, decoder: BodyDecoder) -> Message:
        """Return the next decoded piece of a compressed body."""
        while not (piece := decoder.read()):
            if self._received_all:
                decoder.finish()
                self._decoder = None
                self._release(decoder.window_bytes)
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            decoder.feed(message["body"])
            self._received_all = not message["more_body"]
        self._decoded += len(piece)
        self._reserve(max(self._length or 0, self._received) + self._decoded + decoder.window_bytes)
        await asyncio.sleep(0)  # let other requests run between two pieces
        return {"type": "http.request", "body": piece, "more_body": True}

    async def _receive(self) -> Message:
        """Return the next received bytes of the request body; see `receive`."""
        if (size := self._length or self._received) > self._reserved:
            self._reserve(size)
        # `100 Continue` is sent only now, because an application that rejects the request needs no body.
        if self._expects and not self.disconnect.gone:
            self._expects = False
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
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
        """Send the response's head, or the next bytes of its body (ASGI's `send`).

        Messages are dropped if the client has disconnected.

        Raises:
            RuntimeError: the message is not allowed at this point, or its headers or length are invalid.
        """
        if self._connection.writable is not None:
            await self._connection.writable.wait()
        if self.disconnect.gone:
            return
        kind = message["type"]
        if kind == "http.response.body" and self.started and not self.complete:
            self._write(message.get("body", b""), message.get("more_body", False))
        elif kind == "http.response.start" and not self.started:
            self._start(message["status"], list(message.get("headers", ())))
        else:
            raise RuntimeError(f"the application sent the message {kind} before or after it is allowed in a response")

    def send_interim(self) -> bool:
        """Send the interim response `102 Processing`.

        Nothing is sent while the client is slow to read or waits for `100 Continue`.

        Returns:
            True if the caller may send another interim response later. False if the response has begun, the client has
                disconnected, or the client does not support HTTP/1.1.
        """
        if self.started or self.disconnect.gone or not self._speaks_1_1:
            return False
        if not self._expects and self._connection.writable is None:
            self._connection.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        return True

    def _reserve(self, size: int) -> None:
        if not self.started:
            self._connection.service.bodies.reserve(self._connection.address, size - self._reserved)
            self._reserved = size

    def _release(self, size: int) -> None:
        size = min(size, self._reserved)
        if size:
            self._connection.service.bodies.release(self._connection.address, size)
            self._reserved -= size

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
            raise RuntimeError("a header of the response contains a line break or NUL; remove it in the application")
        self.started = True
        self._expects = False
        self._remaining_length, self._chunked = remaining_length, chunked
        head = b"%b%b%b\r\n" % (line, self._connection.service.date(), header_block)
        if remaining_length:
            self._head = head
        else:
            self._connection.write(head)  # at once, because the first event of a stream may take long

    def _write(self, body: bytes, more: bool) -> None:
        if self._chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                chunk += b"0\r\n\r\n"
            if chunk:
                self._connection.write(chunk)
        elif not self._is_head:
            if self._remaining_length is not None:
                self._remaining_length -= len(body)
                if self._remaining_length < 0 or (self._remaining_length and not more):
                    raise RuntimeError("the application's response body is longer or shorter than its content-length")
            if body:
                self._connection.write(self._head + body, last=not more)
                self._head = b""
        if not more:
            # drop the buffered request body, which the application will not read any more
            self._take_chunks()
            self.complete = True
            self._wake_receiver()
            self._connection.response_done(keep_alive=self.keep_alive)

    def _take_chunks(self) -> bytes:
        chunks, size = self._chunks, self._size
        if not chunks:
            return b""
        self._chunks, self._size = [], 0
        self._connection.body_consumed(size)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _wake_receiver(self) -> None:
        self._has_event = True
        if self._event is not None:
            self._event.set()

    def _break_off(self, error: ApiError) -> None:
        if not self.started or self._head:
            self.keep_alive = False
            body = orjson.dumps(error.envelope())
            length = (b"content-length", b"%d" % len(body))
            self._start(error.status, [(b"content-type", b"application/json"), length])
            self._connection.write(b"" if self._is_head else self._head + body)
        self._take_chunks()
        self._connection.end()
