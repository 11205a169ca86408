"""A connection to a node, the response of its current request, and their errors."""

import asyncio
import fcntl
import sys
import termios
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from helexa.http.headers import Headers
from helexa.http.idle_connections import enable_tcp_keep_alive, is_gone


class UpstreamError(Exception):
    """A request to a node failed: no response arrived, or the response is incomplete."""


class ConnectError(UpstreamError):
    """The connection to the node failed, so the node has not received the request."""


class LocalConnectError(UpstreamError):
    """The connection failed because the gateway lacks descriptors, ports or memory."""


class IncompleteResponseError(UpstreamError):
    """The connection ended before or within the response, or the HTTP is invalid."""

    def __init__(self, reason: str, *, is_invalid: bool = False) -> None:
        super().__init__(reason)
        self.is_invalid = is_invalid  # True if the node sent invalid HTTP


class ReadTimeoutError(UpstreamError):
    """The node sent no data over the connection within a timeout.

    The node may have received the request, and may still be working on it.
    """


# Interval of the `102 Processing` responses that a node sends while it computes a non-streamed response.
INTERIM_SECS = 15

_MAX_HEADER_BYTES = 64 << 10
_HIGH_WATER_BYTES = 256 << 10
_RECHECK_SECS = 1.0


@dataclass(frozen=True)
class Origin:
    """The origin of connections: host and port of a server, `tls` for https."""

    host: str
    port: int
    tls: bool

    @property
    def authority(self) -> str:
        """The value of the `Host` header for requests to this origin."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


@lru_cache(maxsize=1024)
def parse_base(url: str) -> tuple[Origin, str]:
    """Split a node's base URL into the connection's origin and the path."""
    url_parts = urlsplit(url)
    tls = url_parts.scheme == "https"
    host = (url_parts.hostname or "").encode("idna").decode()
    return Origin(host, url_parts.port or (443 if tls else 80), tls), url_parts.path


@dataclass
class Timeouts:
    """The timeouts of all connections of a client."""

    # A request fails after this time without data. Before the response body begins, this applies only if the node is
    # down, because a non-streamed response may take arbitrarily long.
    idle_secs: float
    answer_secs: float  # longest wait for the first byte of a response body from a node that is up. 0 means no limit.


class UpstreamResponse:
    """A connection's HTTP response whose head has arrived; it must be closed."""

    def __init__(self, connection: "UpstreamConnection") -> None:
        self._connection = connection
        self._closed = False
        self.status = connection.status  # HTTP status
        self.headers = connection.headers  # headers as the node sent them, with names in lower case

    @property
    def complete(self) -> bool:
        """Whether the whole body has been read."""
        return self._connection.complete

    @property
    def last_received_at(self) -> float:
        """When bytes last arrived (time of the event loop's clock)."""
        return self._connection.last_received_at

    def chunk(self) -> Coroutine[Any, Any, bytes]:
        """Return the next bytes of the body, or empty bytes at its end.

        Raises:
            IncompleteResponseError: the connection ended before the end of the body.
            ReadTimeoutError: a timeout expired.
        """
        return self._connection.body()  # no `await` here: it would cost one more coroutine frame per chunk

    def close(self) -> None:
        """Pool the connection, or close it if the body was not fully read.

        Later calls have no effect.
        """
        # After the first call, the connection may already be in use for another request.
        if not self._closed:
            self._closed = True
            self._connection.release()  # if this closes the connection, the node cancels the request


class UpstreamConnection(asyncio.Protocol):
    """An HTTP/1.1 connection to a node. It is used for one request at a time."""

    def __init__(
        self,
        origin: Origin,
        timeouts: Timeouts,
        on_idle: "Callable[[UpstreamConnection], None]",
        on_lost: "Callable[[UpstreamConnection], None]",
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.origin = origin  # scheme, host and port of the node
        self.last_received_at = loop.time()  # when bytes last arrived (time of the event loop's clock)
        self.response_began = False  # True if bytes arrived since the current request was sent
        # True if the server closed the connection without having read the whole request: the server reset the
        # connection, or the server's kernel has not acknowledged all bytes of the request
        self.closed_early = False
        # status and headers of the current response
        self.status = 0
        self.headers: Headers = []
        self._timeouts = timeouts  # the timeouts of the client, which may be changed at any time
        self._on_idle = on_idle  # called when the connection may be used for another request
        self._on_lost = on_lost  # called when the node has closed the idle connection
        self._loop = loop
        self._awaiting_response = False
        self._request_sent_at = 0.0
        self._is_alive: Callable[[], bool] | None = None
        self._body_began = False  # True once bytes of the response's body arrived
        self._interim_header = b""
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._header_bytes = 0
        self._head_complete = False
        self._until_close = False
        self._complete = False
        self._keep_alive = False
        self._failure: UpstreamError | None = None
        self._chunks: list[bytes] = []
        self._buffered_bytes = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def complete(self) -> bool:
        """Whether the whole body of the response has been read."""
        return self._complete and not self._chunks

    def is_open(self) -> bool:
        """Return whether event loop and kernel say that the connection is open."""
        if self._transport is None or self._transport.is_closing():
            return False
        return not is_gone(self._transport.get_extra_info("socket").fileno())

    async def ask(
        self, head: bytes, body: bytes, is_alive: Callable[[], bool] | None, interim: bool
    ) -> UpstreamResponse:
        """Send a request, wait for the head of its response, and return the response.

        Args:
            head: request line and headers, without the empty line that ends them.
            body: the request's body.
            is_alive: function that returns whether the node is up. It is called if no data arrives.
            interim: True to ask the node for `102 Processing` responses until its response begins.

        Raises:
            IncompleteResponseError: the connection ended before the response.
            ReadTimeoutError: a timeout expired.
        """
        if self._transport is None or self._transport.is_closing():
            raise IncompleteResponseError("the connection was closed before the request was sent")
        self._awaiting_response, self.response_began, self.status, self.headers = True, False, 0, []
        self._header_bytes, self._head_complete, self._until_close, self._complete, self._keep_alive = (
            0,
            False,
            False,
            False,
            False,
        )
        self.last_received_at = self._request_sent_at = self._loop.time()
        self._is_alive, self._body_began = is_alive, False
        if self._timeouts.answer_secs:
            self._clear_timer()  # the timer of the previous request may expire too late for this limit
        if interim:
            head += self._interim_header
        # A small body is sent together with the head in one system call. A large body is sent alone to avoid a copy.
        if len(body) <= _HIGH_WATER_BYTES:
            self._transport.write(b"%b\r\n%b" % (head, body))
        else:
            self._transport.write(head + b"\r\n")
            self._transport.write(body)
        try:
            while not self._head_complete:
                await self._wait_for_event()
        # Close the connection. Otherwise, the next request would read the rest of this response as its own.
        except BaseException:
            self.abort()
            raise
        return UpstreamResponse(self)

    async def body(self) -> bytes:
        """Return the next bytes of the response's body, or empty bytes at its end.

        Raises:
            IncompleteResponseError: the connection ended before the end of the body.
            ReadTimeoutError: a timeout expired.
        """
        while not self._chunks:
            if self._complete:
                return b""
            await self._wait_for_event()
        chunks, self._chunks, self._buffered_bytes = self._chunks, [], 0
        if self._paused and self._transport is not None:
            self._paused = False
            self.last_received_at = self._loop.time()  # while reading was paused, no bytes could arrive
            self._transport.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def release(self) -> None:
        """Put the connection back into the pool if it can be used again, else close it."""
        self._awaiting_response = False
        is_open = self._transport is not None and not self._transport.is_closing() and self._failure is None
        if self._complete and self._keep_alive and is_open and not self._chunks:
            self._on_idle(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        self._clear_timer()
        if self._transport is not None:
            self._transport.abort()

    async def _wait_for_event(self) -> None:
        """Wait for bytes or the end of the response. Callers first read buffered bytes."""
        if self._failure is not None:
            raise self._failure
        self._waiter = self._loop.create_future()
        if self._timer is None:
            self._check_silence()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _check_silence(self) -> None:
        """Fail the request if a timeout expired, else restart the timer."""
        self._timer = None
        if not self._awaiting_response:
            return
        # There is one timer per connection instead of one per read. `last_received_at` shows whether data has arrived
        # since the timer was started.
        now, idle_secs, answer_secs = self._loop.time(), self._timeouts.idle_secs, self._timeouts.answer_secs
        secs_left = self.last_received_at + idle_secs - now
        if not self._body_began:
            # A non-streamed response may take arbitrarily long, so wait on while polls show that the node is up.
            if secs_left <= 0 and self._is_alive is not None and self._is_alive():
                secs_left = _RECHECK_SECS
            if answer_secs:
                secs_left = min(secs_left, self._request_sent_at + answer_secs - now)
        # reading is paused because the client reads too slowly, so the node's silence is not an error
        if self._paused:
            secs_left = max(secs_left, _RECHECK_SECS)
        if secs_left > 0:
            self._timer = self._loop.call_later(secs_left, self._check_silence)
        else:
            self._fail(ReadTimeoutError(f"the node sent no byte for {now - self.last_received_at:.0f} s"))

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, failure: UpstreamError) -> None:
        if self._failure is None:
            self._failure = failure
        self._wake()
        self.abort()

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of the new connection, and enable TCP keep-alive."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has the same methods
        enable_tcp_keep_alive(transport.get_extra_info("socket"))
        host, port = transport.get_extra_info("sockname")[:2]
        # The header contains the gateway's address in this connection. A node sends 102 responses only if its peer has
        # this address, so not behind a proxy. Some proxies would take a 102 response for the final response.
        self._interim_header = f"x-helexa-keep-alive: {INTERIM_SECS}; from={host}:{port}\r\n".encode()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; fail if bytes arrive although no response is expected."""
        self.last_received_at = self._loop.time()
        self.response_began = True
        if not self._awaiting_response or self._complete:  # no request was sent, or its response is complete
            self._fail(IncompleteResponseError("the node sent bytes after the response", is_invalid=True))
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(IncompleteResponseError("the node sent a protocol upgrade", is_invalid=True))
        except httptools.HttpParserError as error:
            # An exception of a callback, such as `on_header`, is the context of the parser's exception.
            self._fail(IncompleteResponseError(str(error.__context__ or error), is_invalid=True))
        else:
            # Many buffered bytes mean that the client reads more slowly than the node sends.
            if self._buffered_bytes > _HIGH_WATER_BYTES and not self._paused and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
            if self._head_complete:
                self._wake()

    def eof_received(self) -> None:
        """When the server closes its side, record whether it got the whole request."""
        transport = self._transport
        if transport is not None and self._awaiting_response and not self.response_began:
            unacknowledged = _unacknowledged_bytes(transport.get_extra_info("socket").fileno())
            self.closed_early = transport.get_write_buffer_size() > 0 or unacknowledged > 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Complete a response without a stated length; fail other unfinished responses."""
        self.closed_early = self.closed_early or isinstance(exc, ConnectionError)
        if not self._awaiting_response:
            self._on_lost(self)
        # After a failure, the client itself has closed the connection: this is not the end of the body.
        elif self._until_close and exc is None and not self._complete and self._failure is None:
            self._complete = True
            self._wake()
        elif not self._complete:
            failure = IncompleteResponseError(type(exc).__name__ if exc else "the node closed the connection")
            failure.__cause__ = exc
            self._fail(failure)
        self._clear_timer()
        self._transport = None

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """Fail the connection if the node sends a second response to one request."""
        if self._complete:
            raise ValueError("the node sent bytes after the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store one response header. Fail if the headers are too long."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"the headers of the node's response exceed {_MAX_HEADER_BYTES} bytes")
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Store the status, and determine how the end of the body is marked."""
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            names = {name for name, _ in self.headers}
            self._until_close = not names & {b"content-length", b"transfer-encoding"} and self.status not in (204, 304)
            self._keep_alive = self._parser.should_keep_alive() and not self._until_close
            self._head_complete = True

    def on_body(self, body: bytes) -> None:
        """Buffer received bytes of the response body."""
        self._body_began = True
        self._chunks.append(body)
        self._buffered_bytes += len(body)

    def on_message_complete(self) -> None:
        """Mark the response as complete, unless it is an interim (1xx) response."""
        if self.status < 200:  # the final response follows
            self.headers = []
            self._header_bytes = 0
        else:
            self._complete = True


def _unacknowledged_bytes(descriptor: int) -> int:
    """Return how many written bytes the peer's kernel has not acknowledged."""
    try:
        count = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0
    return int.from_bytes(count, sys.byteorder)
