"""The pool of connections to nodes."""

import asyncio
import os
import ssl
from collections import deque
from collections.abc import Callable

from helexa.cortex.upstream.connection import Connection, UpstreamResponse
from helexa.cortex.upstream.errors import ConnectError, IncompleteResponseError, LocalConnectError
from helexa.cortex.upstream.origin import Origin, parse_base
from helexa.http.connections.local_errors import is_local_error
from helexa.http.connections.request_head import Headers

CONNECT_TIMEOUT_SECS = 2.0

# Shorter than the keep-alive timeout of common servers, so that a server does not close a connection during its reuse.
KEEPALIVE_SECS = 4.0

UNCHECKED_SECS = 0.5
"""Connections that were idle for longer are checked before reuse."""

MAX_IDLE = 1024

_MAX_IDLE_AT_AN_ORIGIN = 256


class Upstream:
    """HTTP client with pooled connections to any number of origins.

    Args:
        max_idle: maximum number of idle connections over all origins.

    Attributes:
        idle_timeout_secs: a request fails after this time without data. Before the response body begins, this applies
            only if the node is down.
        answer_timeout_secs: longest wait for the first byte of a response body from a node that is up. 0 means no
            limit.
    """

    def __init__(
        self, idle_timeout_secs: float = 300.0, answer_timeout_secs: float = 0.0, *, max_idle: int = MAX_IDLE
    ) -> None:
        self.idle_timeout_secs = idle_timeout_secs
        self.answer_timeout_secs = answer_timeout_secs
        self._max_idle = max_idle
        self._idle: dict[Origin, deque[Connection]] = {}
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
        is_alive: Callable[[], bool] | None = None,
        interim: bool = False,
        repeatable: bool = False,
    ) -> UpstreamResponse:
        """Send a request, wait for the head of its response, and return the response.

        A server may close an idle connection while the next request is being sent. A GET request, or a request with
        `repeatable`, is then sent again over a new connection. Any other request fails, because the server may have
        read it before the connection ended.

        Args:
            method: HTTP method.
            base: the node's base URL.
            path: path and query below the base URL.
            headers: all headers except `host` and `content-length`. They must not contain line breaks.
            body: body of the request.
            is_alive: function that returns whether the node is up. It is called if the connection receives no data.
            interim: ask the node for `102 Processing` responses every `INTERIM_SECS` until its response begins.
            repeatable: True if the request may be sent twice.

        Raises:
            ConnectError: the connection was refused, or took longer than `CONNECT_TIMEOUT_SECS`.
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
            try:
                return await connection.ask(request_head, body, is_alive, interim)
            except IncompleteResponseError:
                if connection.response_began or not (repeatable or method == b"GET"):
                    raise
        return await (await self._connect(origin)).ask(request_head, body, is_alive, interim)

    def close(self) -> None:
        """Close the idle connections. A connection in use is closed at the end of its response."""
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()
        self._idle_count = 0

    def put_back(self, connection: Connection) -> None:
        """Put an idle connection back into the pool.

        If the pool has too many idle connections, close the oldest one.
        """
        idle_connections = self._idle.setdefault(connection.origin, deque())
        idle_connections.append(connection)
        self._idle_count += 1
        if len(idle_connections) > _MAX_IDLE_AT_AN_ORIGIN:
            self._pop_oldest(connection.origin).abort()
        elif self._idle_count > self._max_idle:
            self._pop_oldest(next(iter(self._idle))).abort()

    def remove(self, connection: Connection) -> None:
        """Remove an idle connection from the pool because the server closed it."""
        idle_connections = self._idle.get(connection.origin)
        if idle_connections is not None and connection in idle_connections:
            idle_connections.remove(connection)
            self._count_removed(connection.origin, idle_connections)

    def _reusable_connection(self, origin: Origin) -> Connection | None:
        while idle_connections := self._idle.get(origin):
            connection = idle_connections.pop()
            self._count_removed(origin, idle_connections)
            idle_secs = self._loop.time() - connection.last_received_at
            if idle_secs < UNCHECKED_SECS or (idle_secs < KEEPALIVE_SECS and connection.is_open()):
                return connection
            connection.abort()
        return None

    def _pop_oldest(self, origin: Origin) -> Connection:
        idle_connections = self._idle[origin]
        connection = idle_connections.popleft()
        self._count_removed(origin, idle_connections)
        return connection

    def _count_removed(self, origin: Origin, idle_connections: deque[Connection]) -> None:
        self._idle_count -= 1
        if not idle_connections:
            del self._idle[origin]

    async def _connect(self, origin: Origin) -> Connection:
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECS):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self, origin, self._loop),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.tls else None,
                )
        except (OSError, TimeoutError) as error:
            raise (LocalConnectError if is_local_error(error) else ConnectError)(_reason(error)) from error
        return connection


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno and error.errno > 0 else type(error).__name__
