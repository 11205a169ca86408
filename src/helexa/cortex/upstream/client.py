"""HTTP client for nodes: the pool of connections, by origin."""

import asyncio
import os
import ssl
from collections import deque
from collections.abc import Callable

from helexa.cortex.upstream.connection_and_timeouts import (
    ConnectError,
    IncompleteResponseError,
    LocalConnectError,
    Origin,
    Timeouts,
    UpstreamConnection,
    UpstreamResponse,
    parse_base,
)
from helexa.http.headers import Headers
from helexa.http.process import is_local_error

CONNECT_TIMEOUT_SECS = 2.0

_STALL_SECS = 0.1  # if a timeout fires later than this after its deadline, this process had no CPU time at the deadline

# Shorter than the keep-alive timeout of common servers, so that a server does not close a connection during its reuse.
KEEPALIVE_SECS = 4.0

UNCHECKED_SECS = 0.5  # connections that were idle for longer are checked before reuse

# A server may close an idle connection just when the next request is sent. This request can then be sent again.
# If the connection ends later than this after the request was sent, the server closed it for another reason.
CLOSED_IDLE_SECS = 1.0

MAX_IDLE = 1024

_MAX_IDLE_AT_AN_ORIGIN = 256


class Upstream:
    """HTTP client with pooled connections to any number of origins."""

    def __init__(
        self,
        idle_timeout_secs: float = 300.0,
        answer_timeout_secs: float = 0.0,
        *,
        max_idle: int = MAX_IDLE,
        connect_timeout_secs: float = CONNECT_TIMEOUT_SECS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        # The timeouts of requests. They may be changed at any time.
        self.timeouts = Timeouts(idle_timeout_secs, answer_timeout_secs)
        self._max_idle = max_idle  # maximum number of idle connections over all origins
        self._connect_timeout_secs = connect_timeout_secs  # maximum number of seconds to connect to a server
        self._idle: dict[Origin, deque[UpstreamConnection]] = {}
        self._idle_count = 0
        self._tls = tls  # checks the certificates of servers. None means the certificate authorities of the system.
        self._loop = asyncio.get_running_loop()

    async def ask(
        self,
        method: bytes,
        base: str,
        path: str,
        headers: Headers,
        body: bytes = b"",
        *,
        is_alive: Callable[[], bool] | None = None,
        interim: bool = False,
        repeatable: bool = False,
    ) -> UpstreamResponse:
        """Send a request, and return its response, which the caller must close.

        Args:
            headers: all headers except `host` and `content-length`. They must not contain line breaks.
            is_alive: function that returns whether the node is up. While it returns True, the idle timeout does not
                apply before the first byte of the body.
            interim: ask the node for `102 Processing` responses every `INTERIM_SECS` until its response begins.
            repeatable: True if the request may be sent twice, as a GET request always may. Other requests are sent
                again only if the server closed an idle connection without reading the whole request.

        Raises:
            ConnectError: the connection failed, or took longer than `connect_timeout_secs`.
            LocalConnectError: the gateway is out of file descriptors, ports or memory.
            IncompleteResponseError: the connection ended before the response began.
            ReadTimeoutError: no data arrived within a timeout.
        """
        origin, prefix = parse_base(base)
        target = prefix.encode() + path.encode()
        lines = [b"%s %s HTTP/1.1\r\nhost: %s" % (method, target, origin.authority.encode())]
        lines += [name + b": " + value for name, value in headers]
        request_head = b"\r\n".join(lines) + b"\r\ncontent-length: %d\r\n" % len(body)
        connection = self._reusable_connection(origin)
        if connection is not None:
            sent_at = self._loop.time()
            try:
                return await connection.ask(request_head, body, is_alive, interim)
            except IncompleteResponseError:
                was_closed_idle = connection.closed_early and self._loop.time() - sent_at < CLOSED_IDLE_SECS
                if connection.response_began or not (was_closed_idle or repeatable or method == b"GET"):
                    raise
        return await (await self._connect(origin)).ask(request_head, body, is_alive, interim)

    def close(self) -> None:
        """Close the idle connections. Others return to the pool after their responses."""
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()
        self._idle_count = 0

    def _put_back(self, connection: UpstreamConnection) -> None:
        """Put an idle connection into the pool. A full pool closes its oldest connection."""
        idle_connections = self._idle.setdefault(connection.origin, deque())
        idle_connections.append(connection)
        self._idle_count += 1
        if len(idle_connections) > _MAX_IDLE_AT_AN_ORIGIN:
            self._pop_oldest(connection.origin).abort()
        elif self._idle_count > self._max_idle:
            self._pop_oldest(next(iter(self._idle))).abort()

    def _remove(self, connection: UpstreamConnection) -> None:
        """Remove an idle connection from the pool because the server closed it."""
        idle_connections = self._idle.get(connection.origin)
        if idle_connections is not None and connection in idle_connections:
            idle_connections.remove(connection)
            self._count_removed(connection.origin, idle_connections)

    def _reusable_connection(self, origin: Origin) -> UpstreamConnection | None:
        while idle_connections := self._idle.get(origin):
            connection = idle_connections.pop()
            self._count_removed(origin, idle_connections)
            idle_secs = self._loop.time() - connection.last_received_at
            if idle_secs < UNCHECKED_SECS or (idle_secs < KEEPALIVE_SECS and connection.is_open()):
                return connection
            connection.abort()
        return None

    def _pop_oldest(self, origin: Origin) -> UpstreamConnection:
        idle_connections = self._idle[origin]
        connection = idle_connections.popleft()
        self._count_removed(origin, idle_connections)
        return connection

    def _count_removed(self, origin: Origin, idle_connections: deque[UpstreamConnection]) -> None:
        self._idle_count -= 1
        if not idle_connections:
            del self._idle[origin]

    async def _connect(self, origin: Origin) -> UpstreamConnection:
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()

        def new_connection() -> UpstreamConnection:
            return UpstreamConnection(origin, self.timeouts, self._put_back, self._remove, self._loop)

        return await connect(new_connection, origin, origin.host, self._tls, self._connect_timeout_secs)


async def connect(
    new_connection: Callable[[], UpstreamConnection],
    origin: Origin,
    host: str,
    tls: ssl.SSLContext | None,
    timeout_secs: float,
) -> UpstreamConnection:
    """Connect the client to a server, and return the connection.

    Args:
        new_connection: function that returns a new connection to `origin`.
        origin: scheme, host and port of the server.
        host: host or IP address to connect to. The server's certificate must be valid for the origin's host.
        tls: checks the server's certificate; must not be None if `origin` is https.
        timeout_secs: maximum number of seconds of an attempt. Only a stall of this process causes up to two more.

    Raises:
        ConnectError: the connection failed, or took longer than `timeout_secs`.
        LocalConnectError: the gateway is out of file descriptors, ports or memory.
    """
    loop = asyncio.get_running_loop()
    repeats = 2
    while True:
        deadline = loop.time() + timeout_secs
        try:
            async with asyncio.timeout_at(deadline):
                _, connection = await loop.create_connection(
                    new_connection,
                    host,
                    origin.port,
                    ssl=tls if origin.tls else None,
                    server_hostname=origin.host if origin.tls else None,
                )
            return connection
        except (OSError, TimeoutError) as error:
            # If this process had no CPU time meanwhile, the timeout fires although the server may have answered in
            # time. Therefore try again.
            if isinstance(error, TimeoutError) and loop.time() > deadline + _STALL_SECS and repeats:
                repeats -= 1
                continue
            raise (LocalConnectError if is_local_error(error) else ConnectError)(_reason(error)) from error


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno and error.errno > 0 else type(error).__name__
