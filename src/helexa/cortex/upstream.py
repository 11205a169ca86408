"""The HTTP/1.1 client of the data path: requests to nodes over kept connections, answers as bytes as they come.

One request through a general client costs more processor time than all else the gateway does for it, so this one does
only what forwarding needs: POST, a pool of connections for each origin, back-pressure, and a limit on silence instead
of one on the whole. The bytes are parsed by httptools (llhttp), strictly.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast
from urllib.parse import urlsplit

import httptools

CONNECT_TIMEOUT_SECS = 2.0
IDLE_TIMEOUT_SECS = 300.0
# Shorter than the keep-alive of the servers behind, so that they never close a connection just as it is reused.
KEEPALIVE_SECS = 4.0

_MAX_IDLE = 256
_MAX_HEADER_BYTES = 64 << 10
_HIGH_WATER_BYTES = 256 << 10

Headers = list[tuple[bytes, bytes]]


class UpstreamError(Exception):
    """An answer that did not come, or broke off."""


class NotReached(UpstreamError):
    """No connection: the node has seen nothing of the request."""


class BrokenOff(UpstreamError):
    """The connection ended, or what came over it is not HTTP."""


class Silent(UpstreamError):
    """Nothing came for too long. The node has the request, and may still be at it."""


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


class Upstream:
    """Kept connections to any number of origins."""

    def __init__(self) -> None:
        self._idle: dict[Origin, deque[_Connection]] = {}
        self._tls: ssl.SSLContext | None = None
        self._loop = asyncio.get_running_loop()

    async def post(self, base: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> Answer:
        """Send a request and wait for the head of its answer.

        Args:
            base: the node's base URL.
            headers: all but `host` and `content-length`; free of line breaks.

        Raises:
            NotReached: no connection within two seconds.
            BrokenOff: it ended before the answer began.
            Silent: nothing came for `IDLE_TIMEOUT_SECS`.
        """
        return await self.ask(b"POST", base, path, headers, body)

    async def ask(
        self, method: bytes, base: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes = b""
    ) -> Answer:
        """Any other request; see `post`."""
        origin, prefix = parse_base(base)
        target = prefix.encode() + path.encode()
        lines = [b"%s %s HTTP/1.1\r\nhost: %s" % (method, target, origin.authority.encode())]
        lines += [name + b": " + value for name, value in headers]
        head = b"\r\n".join(lines) + b"\r\ncontent-length: %d\r\n\r\n" % len(body)
        connection = self._kept(origin)
        if connection is not None:
            try:
                return await connection.ask(head, body)
            except BrokenOff:
                if connection.spoken:
                    raise
            # Closed by the node while the request was on its way, most likely: then it was idle, and has read nothing.
            try:
                fresh = await self._connect(origin)
            except NotReached as error:  # it is gone, perhaps for having read all of it
                raise BrokenOff("closed, and not reached again") from error
            return await fresh.ask(head, body)
        return await (await self._connect(origin)).ask(head, body)

    def close(self) -> None:
        """Close the connections that are idle; those in use are closed by their answers."""
        for connections in self._idle.values():
            for connection in connections:
                connection.cut()
        self._idle.clear()

    def keep(self, connection: "_Connection") -> None:
        """Take back a connection whose answer is complete."""
        kept = self._idle.setdefault(connection.origin, deque())
        kept.append(connection)
        if len(kept) > _MAX_IDLE:
            kept.popleft().cut()

    def forget(self, connection: "_Connection") -> None:
        """Drop a connection that ended while it was idle."""
        kept = self._idle.get(connection.origin)
        if kept is not None and connection in kept:
            kept.remove(connection)
            if not kept:
                del self._idle[connection.origin]

    def _kept(self, origin: Origin) -> "_Connection | None":
        kept = self._idle.get(origin)
        while kept:
            connection = kept.pop()
            if self._loop.time() - connection.heard_at < KEEPALIVE_SECS:
                return connection
            connection.cut()
        return None

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
            raise NotReached(type(error).__name__) from error
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

    async def ask(self, head: bytes, body: bytes) -> Answer:
        if self._transport is None or self._transport.is_closing():
            raise BrokenOff("closed")
        self._asked, self.spoken, self.status, self.headers = True, False, 0, []
        self._header_bytes, self._headed, self._until_close, self._complete, self._keep = 0, False, False, False, False
        self.heard_at = self._loop.time()
        if len(body) <= _HIGH_WATER_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
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
            self._alarm = self._loop.call_later(IDLE_TIMEOUT_SECS, self._check_silence)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _check_silence(self) -> None:
        """One timer a connection, set again for what is left, instead of one a read; it ends when nobody waits."""
        self._alarm = None
        if not self._asked:
            return
        left = self.heard_at + IDLE_TIMEOUT_SECS - self._loop.time()
        if left > 0 or self._paused:  # while the client takes nothing, the node is not the one that is silent
            self._alarm = self._loop.call_later(max(left, 1.0), self._check_silence)
        else:
            self._fail(Silent("nothing came"))

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
        self._chunks.append(body)
        self._held_bytes += len(body)

    def on_message_complete(self) -> None:
        if self.status < 200:  # the answer itself is still to come
            self.headers = []
            self._header_bytes = 0
        else:
            self._complete = True
