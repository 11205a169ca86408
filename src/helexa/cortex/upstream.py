"""The HTTP/1.1 client of the data path: pooled connections to nodes, responses as raw bytes.

A general-purpose client costs more processor time per request than the rest of the gateway, so this client implements
only what forwarding needs: one connection pool per origin, back-pressure, and timeouts on silence instead of a
total timeout. httptools (llhttp) parses the responses, strictly.

Timeouts:

* Connecting to a node may take `CONNECT_TIMEOUT_SECS`.
* Before the first byte of a response's body, `idle_timeout_secs` of silence fail the request only if the node is down
  according to the `lives` callback. The first byte from a living node is awaited for `answer_timeout_secs`, which
  defaults to no limit: a slow node may need any time for a non-streamed response.
* After the first byte, `idle_timeout_secs` of silence fail the request.
* TCP keep-alive probes fail a connection whose host vanished or restarted.
"""

import asyncio
import os
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast
from urllib.parse import urlsplit

import httptools

from helexa.http.hang_up import is_gone
from helexa.http.head import Headers
from helexa.http.local_errors import is_local_error
from helexa.http.tcp_keep_alive import enable_tcp_keep_alive

CONNECT_TIMEOUT_SECS = 2.0
INTERIM_SECS = 15
"""Interval of the `102 Processing` responses that a node is asked for while it makes a non-streamed response."""

# Shorter than the keep-alive of the servers behind, so that they never close a connection just as it is reused.
KEEPALIVE_SECS = 4.0

UNCHECKED_SECS = 0.5
"""Connections that are idle for longer are checked before their next use: no server's keep-alive is that short."""

MAX_IDLE = 1024

_MAX_IDLE_AT_AN_ORIGIN = 256
_MAX_HEADER_BYTES = 64 << 10
_HIGH_WATER_BYTES = 256 << 10
_RECHECK_SECS = 1.0


class UpstreamError(Exception):
    """An answer that did not come, or broke off."""


class NotReached(UpstreamError):
    """No connection: the node has seen nothing of the request."""


class LocalError(UpstreamError):
    """No connection because the gateway is out of descriptors, ports or memory; the node is not to blame."""


class BrokenOff(UpstreamError):
    """The connection ended, or what came over it is not HTTP."""


class Silent(UpstreamError):
    """A timeout on silence expired. The node received the request and may still be working on it."""


@dataclass(frozen=True)
class Origin:
    """Where connections lead."""

    host: str
    port: int
    tls: bool

    @property
    def authority(self) -> str:
        """The `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


@lru_cache(maxsize=1024)
def parse_base(url: str) -> tuple[Origin, str]:
    """The origin and the path prefix of a node's base URL, which the configuration has checked."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    host = (parts.hostname or "").encode("idna").decode()
    return Origin(host, parts.port or (443 if tls else 80), tls), parts.path


class Answer:
    """One answer: status and headers at once, the body chunk by chunk.

    Attributes:
        headers: as the node sent them, names in lower case.
    """

    def __init__(self, connection: "_Connection") -> None:
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    @property
    def complete(self) -> bool:
        """Whether all of the body was taken, so that `chunk` would be empty."""
        return self._connection.complete

    async def chunk(self) -> bytes:
        """The next bytes of the body, as they come; empty at its end.

        Raises:
            BrokenOff, Silent: the rest will not come.
        """
        return await self._connection.body()

    def close(self) -> None:
        """Let the connection go: to the pool if the answer is complete, else it is cut, which the node notices."""
        self._connection.release()


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno and error.errno > 0 else type(error).__name__


class Upstream:
    """Pooled connections to any number of origins.

    Args:
        max_idle: most connections that are kept idle, over all origins.

    Attributes:
        idle_timeout_secs: longest silence within a response, or before it if the node is down.
        answer_timeout_secs: longest wait for the first byte of a response's body from a living node; 0 for no limit.
    """

    def __init__(
        self, idle_timeout_secs: float = 300.0, answer_timeout_secs: float = 0.0, *, max_idle: int = MAX_IDLE
    ) -> None:
        self.idle_timeout_secs = idle_timeout_secs
        self.answer_timeout_secs = answer_timeout_secs
        self._max_idle = max_idle
        self._idle: dict[Origin, deque[_Connection]] = {}
        self._idle_count = 0
        self._tls: ssl.SSLContext | None = None
        self._loop = asyncio.get_running_loop()

    async def ask(
        self,
        method: bytes,
        base: str,
        path: str,
        headers: Headers,
        body: bytes = b"",
        *,
        lives: Callable[[], bool] | None = None,
        interim: bool = False,
        repeatable: bool = False,
    ) -> Answer:
        """Send a request and wait for the head of its response.

        A server may close an idle connection in the moment of the next request. The request is then sent again over a
        new connection only if that is harmless: it is a GET, or `repeatable`. Any other request fails, because the
        server may have read it before the connection ended.

        Args:
            base: the node's base URL.
            headers: all but `host` and `content-length`; free of line breaks.
            lives: returns whether the node answers elsewhere; consulted when it is silent on this connection.
            interim: ask the node for `102 Processing` responses every `INTERIM_SECS` until its response begins.

        Raises:
            NotReached: no connection within two seconds.
            LocalError: no connection, because the gateway is out of descriptors, ports or memory.
            BrokenOff: the connection ended before the response began.
            Silent: a timeout on silence expired.
        """
        origin, prefix = parse_base(base)
        target = prefix.encode() + path.encode()
        lines = [b"%s %s HTTP/1.1\r\nhost: %s" % (method, target, origin.authority.encode())]
        lines += [name + b": " + value for name, value in headers]
        head = b"\r\n".join(lines) + b"\r\ncontent-length: %d\r\n" % len(body)
        connection = self._kept(origin)
        if connection is not None:
            try:
                return await connection.ask(head, body, lives, interim)
            except BrokenOff:
                if connection.spoken or not (repeatable or method == b"GET"):
                    raise
        return await (await self._connect(origin)).ask(head, body, lives, interim)

    def close(self) -> None:
        """Close the connections that are idle; those in use are closed by their answers."""
        for connections in self._idle.values():
            for connection in connections:
                connection.cut()
        self._idle.clear()
        self._idle_count = 0

    def keep(self, connection: "_Connection") -> None:
        """Take back a connection whose answer is complete; close the oldest one if too many are idle."""
        kept = self._idle.setdefault(connection.origin, deque())
        kept.append(connection)
        self._idle_count += 1
        if len(kept) > _MAX_IDLE_AT_AN_ORIGIN:
            self._pop_oldest(connection.origin).cut()
        elif self._idle_count > self._max_idle:
            self._pop_oldest(next(iter(self._idle))).cut()

    def forget(self, connection: "_Connection") -> None:
        """Drop a connection that ended while it was idle."""
        kept = self._idle.get(connection.origin)
        if kept is not None and connection in kept:
            kept.remove(connection)
            self._popped(connection.origin, kept)

    def _kept(self, origin: Origin) -> "_Connection | None":
        while kept := self._idle.get(origin):
            connection = kept.pop()
            self._popped(origin, kept)
            idle_secs = self._loop.time() - connection.heard_at
            if idle_secs < UNCHECKED_SECS or (idle_secs < KEEPALIVE_SECS and connection.is_open()):
                return connection
            connection.cut()
        return None

    def _pop_oldest(self, origin: Origin) -> "_Connection":
        kept = self._idle[origin]
        connection = kept.popleft()
        self._popped(origin, kept)
        return connection

    def _popped(self, origin: Origin, kept: "deque[_Connection]") -> None:
        self._idle_count -= 1
        if not kept:
            del self._idle[origin]

    async def _connect(self, origin: Origin) -> "_Connection":
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECS):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self, origin, self._loop),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.tls else None,
                )
        except (OSError, TimeoutError) as error:
            raise (LocalError if is_local_error(error) else NotReached)(_reason(error)) from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection, which carries one request at a time."""

    def __init__(self, pool: Upstream, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
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
        self._begun = False  # bytes of the response's body came
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
        return self._complete and not self._chunks

    def is_open(self) -> bool:
        """Return whether the server has not closed the connection, as far as this machine's kernel knows."""
        if self._transport is None or self._transport.is_closing():
            return False
        return not is_gone(self._transport.get_extra_info("socket").fileno())

    async def ask(self, head: bytes, body: bytes, lives: Callable[[], bool] | None, interim: bool) -> Answer:
        if self._transport is None or self._transport.is_closing():
            raise BrokenOff("closed")
        self._asked, self.spoken, self.status, self.headers = True, False, 0, []
        self._header_bytes, self._headed, self._until_close, self._complete, self._keep = 0, False, False, False, False
        self.heard_at = self._asked_at = self._loop.time()
        self._lives, self._begun = lives, False
        if self._pool.answer_timeout_secs:
            self._clear_alarm()  # the alarm of the request before may ring too late for this limit
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
        while not self._chunks:
            if self._complete:
                return b""
            await self._something()
        chunks, self._chunks, self._held_bytes = self._chunks, [], 0
        if self._paused and self._transport is not None:
            self._paused = False
            self.heard_at = self._loop.time()  # the node could not be heard while reading was paused
            self._transport.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def release(self) -> None:
        self._asked = False
        usable = self._transport is not None and not self._transport.is_closing() and self._failure is None
        if self._complete and self._keep and usable and not self._chunks:
            self._pool.keep(self)
        else:
            self.cut()

    def cut(self) -> None:
        self._clear_alarm()
        if self._transport is not None:
            self._transport.abort()

    async def _something(self) -> None:
        """Wait until more is known. A failure is told only to those who have taken all that came before it."""
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

        One timer per connection follows `heard_at`, instead of one timer per read. It ends when no request runs.
        """
        self._alarm = None
        if not self._asked:
            return
        now, idle_secs, answer_secs = self._loop.time(), self._pool.idle_timeout_secs, self._pool.answer_timeout_secs
        left = self.heard_at + idle_secs - now
        if not self._begun:
            if left <= 0 and self._lives is not None and self._lives():
                left = _RECHECK_SECS
            if answer_secs:
                left = min(left, self._asked_at + answer_secs - now)
        if self._paused:  # the client reads nothing, so the node's silence means nothing
            left = max(left, _RECHECK_SECS)
        if left > 0:
            self._alarm = self._loop.call_later(left, self._check_silence)
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

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        enable_tcp_keep_alive(transport.get_extra_info("socket"))
        host, port = transport.get_extra_info("sockname")[:2]
        # A node answers with 102 only if it sees this address, since some proxies take a 102 for the response itself.
        self._interim_header = f"x-helexa-keep-alive: {INTERIM_SECS}; from={host}:{port}\r\n".encode()

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        self.spoken = True
        if not self._asked or self._complete:  # nobody has asked for this
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
        if not self._asked:
            self._pool.forget(self)
        elif self._until_close and exc is None and not self._complete:
            self._complete = True
            self._wake()
        elif not self._complete:
            self._fail(BrokenOff(type(exc).__name__ if exc else "closed"))
        self._clear_alarm()
        self._transport = None

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("bytes after the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise ValueError("too many headers")
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            names = {name for name, _ in self.headers}
            self._until_close = not names & {b"content-length", b"transfer-encoding"} and self.status not in (204, 304)
            self._keep = self._parser.should_keep_alive() and not self._until_close
            self._headed = True

    def on_body(self, body: bytes) -> None:
        self._begun = True
        self._chunks.append(body)
        self._held_bytes += len(body)

    def on_message_complete(self) -> None:
        if self.status < 200:  # the answer itself is still to come
            self.headers = []
            self._header_bytes = 0
        else:
            self._complete = True
