"""One connection to a node, and the response on it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, cast

import httptools

from helexa.cortex.upstream.errors import BrokenOff, Silent, UpstreamError
from helexa.cortex.upstream.origin import Origin
from helexa.http.connections.client_disconnect import is_gone
from helexa.http.connections.request_head import Headers
from helexa.http.connections.tcp_keep_alive import enable_tcp_keep_alive

INTERIM_SECS = 15
"""Interval of the `102 Processing` responses that a node sends while it computes a non-streamed response."""

_MAX_HEADER_BYTES = 64 << 10
_HIGH_WATER_BYTES = 256 << 10
_RECHECK_SECS = 1.0


class Pool(Protocol):
    """The interface of the pool that a connection needs.

    Attributes:
        idle_timeout_secs: longest silence within a response, or before it if the node is down.
        answer_timeout_secs: longest wait for the first byte of a response's body from a living node; 0 for no limit.
    """

    idle_timeout_secs: float
    answer_timeout_secs: float

    def keep(self, connection: "Connection") -> None:
        """Return a connection with a complete response to the pool."""
        ...

    def forget(self, connection: "Connection") -> None:
        """Drop a connection that ended while it was idle."""
        ...


class Answer:
    """One response: status and headers are known from the start, the body follows chunk by chunk.

    Attributes:
        status: HTTP status.
        headers: headers as the node sent them, with names in lower case.
    """

    def __init__(self, connection: "Connection") -> None:
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    @property
    def complete(self) -> bool:
        """Whether the whole body was read, so that `chunk` would return empty bytes."""
        return self._connection.complete

    def chunk(self) -> Coroutine[Any, Any, bytes]:
        """Await the next bytes of the body; empty at the end.

        Raises:
            BrokenOff, Silent: the rest of the body will not arrive.
        """
        return self._connection.body()  # no `await` here: it would cost one more frame per chunk

    def close(self) -> None:
        """Return the connection to the pool if the response is complete, else close it, which the node notices."""
        self._connection.release()


class Connection(asyncio.Protocol):
    """One connection, which carries one request at a time.

    Attributes:
        origin: the server.
        heard_at: when the last bytes arrived (the event loop's clock).
        spoken: True if bytes arrived since the last request was sent.
        status, headers: status and headers of the response.
    """

    def __init__(self, pool: Pool, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self.origin = origin
        self.heard_at = loop.time()
        self.spoken = False
        self.status = 0
        self.headers: Headers = []
        self._pool = pool
        self._loop = loop
        self._asked = False
        self._asked_at = 0.0
        self._lives: Callable[[], bool] | None = None
        self._begun = False  # True once bytes of the response's body arrived
        self._interim_header = b""
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._header_bytes = 0
        self._headed = False
        self._until_close = False
        self._complete = False
        self._keep = False
        self._failure: UpstreamError | None = None
        self._chunks: list[bytes] = []
        self._held_bytes = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def complete(self) -> bool:
        """Whether the whole body of the response was read."""
        return self._complete and not self._chunks

    def is_open(self) -> bool:
        """Return whether the connection is open in the kernel's view."""
        if self._transport is None or self._transport.is_closing():
            return False
        return not is_gone(self._transport.get_extra_info("socket").fileno())

    async def ask(self, head: bytes, body: bytes, lives: Callable[[], bool] | None, interim: bool) -> Answer:
        """Send a request, wait for the head of its response, and return the response.

        Args:
            head: request line and headers, without the empty line that ends them.
            body: the request's body.
            lives: see `Upstream.ask`.
            interim: see `Upstream.ask`.

        Raises:
            BrokenOff, Silent: no response arrived.
        """
        if self._transport is None or self._transport.is_closing():
            raise BrokenOff("closed")
        self._asked, self.spoken, self.status, self.headers = True, False, 0, []
        self._header_bytes, self._headed, self._until_close, self._complete, self._keep = 0, False, False, False, False
        self.heard_at = self._asked_at = self._loop.time()
        self._lives, self._begun = lives, False
        if self._pool.answer_timeout_secs:
            self._clear_alarm()  # the timer of the previous request may expire too late for this limit
        if interim:
            head += self._interim_header
        if len(body) <= _HIGH_WATER_BYTES:
            self._transport.write(b"%b\r\n%b" % (head, body))
        else:
            self._transport.write(head + b"\r\n")
            self._transport.write(body)
        try:
            while not self._headed:
                await self._something()
        except BaseException:
            self.cut()
            raise
        return Answer(self)

    async def body(self) -> bytes:
        """Return the next bytes of the response's body; empty at the end.

        Raises:
            BrokenOff, Silent: the rest of the body will not arrive.
        """
        while not self._chunks:
            if self._complete:
                return b""
            await self._something()
        chunks, self._chunks, self._held_bytes = self._chunks, [], 0
        if self._paused and self._transport is not None:
            self._paused = False
            self.heard_at = self._loop.time()  # while reading was paused, no bytes could arrive
            self._transport.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def release(self) -> None:
        """Return the connection to the pool if it can carry another request, else close it."""
        self._asked = False
        is_open = self._transport is not None and not self._transport.is_closing() and self._failure is None
        if self._complete and self._keep and is_open and not self._chunks:
            self._pool.keep(self)
        else:
            self.cut()

    def cut(self) -> None:
        """Close the connection at once."""
        self._clear_alarm()
        if self._transport is not None:
            self._transport.abort()

    async def _something(self) -> None:
        """Wait for the next event of the response.

        An error is raised only after all earlier bytes were read.
        """
        if self._failure is not None:
            raise self._failure
        self._waiter = self._loop.create_future()
        if self._alarm is None:
            self._check_silence()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _check_silence(self) -> None:
        """Fail the request if a timeout expired, else set the timer again.

        One timer per connection follows `heard_at`, instead of one timer per read. The timer ends when no request runs.
        """
        self._alarm = None
        if not self._asked:
            return
        now, idle_secs, answer_secs = self._loop.time(), self._pool.idle_timeout_secs, self._pool.answer_timeout_secs
        secs_left = self.heard_at + idle_secs - now
        if not self._begun:
            if secs_left <= 0 and self._lives is not None and self._lives():
                secs_left = _RECHECK_SECS
            if answer_secs:
                secs_left = min(secs_left, self._asked_at + answer_secs - now)
        if self._paused:  # the client reads nothing, so the node's silence is not an error
            secs_left = max(secs_left, _RECHECK_SECS)
        if secs_left > 0:
            self._alarm = self._loop.call_later(secs_left, self._check_silence)
        else:
            self._fail(Silent(f"no byte for {now - self.heard_at:.0f} s"))

    def _clear_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, failure: UpstreamError) -> None:
        if self._failure is None:
            self._failure = failure
        self._wake()
        self.cut()

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of the new connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has the same methods
        enable_tcp_keep_alive(transport.get_extra_info("socket"))
        host, port = transport.get_extra_info("sockname")[:2]
        # A node answers with 102 only if it sees this address: some proxies take a 102 for the response itself.
        self._interim_header = f"x-helexa-keep-alive: {INTERIM_SECS}; from={host}:{port}\r\n".encode()

    def data_received(self, data: bytes) -> None:
        """Parse bytes of the response; bytes outside of a response fail the connection."""
        self.heard_at = self._loop.time()
        self.spoken = True
        if not self._asked or self._complete:  # no response is expected
            self._fail(BrokenOff("bytes after the answer"))
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(BrokenOff("the node wants to upgrade"))
        except httptools.HttpParserError as error:
            self._fail(BrokenOff(type(error).__name__))
        else:
            if self._held_bytes > _HIGH_WATER_BYTES and not self._paused and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
            if self._headed:
                self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the response.

        The response is complete if its body ends with the connection; otherwise it broke off.
        """
        if not self._asked:
            self._pool.forget(self)
        elif self._until_close and exc is None and not self._complete:
            self._complete = True
            self._wake()
        elif not self._complete:
            self._fail(BrokenOff(type(exc).__name__ if exc else "closed"))
        self._clear_alarm()
        self._transport = None

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """Reject a second response."""
        if self._complete:
            raise ValueError("bytes after the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store one header."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise ValueError("too many headers")
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Store the status, and determine how the body ends."""
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            names = {name for name, _ in self.headers}
            self._until_close = not names & {b"content-length", b"transfer-encoding"} and self.status not in (204, 304)
            self._keep = self._parser.should_keep_alive() and not self._until_close
            self._headed = True

    def on_body(self, body: bytes) -> None:
        """Buffer a part of the body."""
        self._begun = True
        self._chunks.append(body)
        self._held_bytes += len(body)

    def on_message_complete(self) -> None:
        """End the response, unless it is an interim response."""
        if self.status < 200:  # the final response follows
            self.headers = []
            self._header_bytes = 0
        else:
            self._complete = True
