"""Accepts connections within limits, so that the process never runs out of file descriptors."""

import asyncio
import logging
import os
import socket
from collections import Counter
from functools import partial

from helexa.http.connections.connection import Connection
from helexa.http.connections.connection_limits import ConnectionLimits
from helexa.http.service import Service

log = logging.getLogger(__name__)

IDLE_SECS = 1.0
PAUSE_SECS = 0.1

_ACCEPTS_PER_CALL = 32
_WARN_SECS = 60.0


class Acceptor:
    """Accepts connections on a listening socket within limits.

    If a new connection exceeds a limit, the acceptor does the first of these that is possible:

    1. Close the connection that has been idle longest, if it has been idle for at least `IDLE_SECS`. If the limit per
       client address is exceeded, only connections of the same address are considered.
    2. Accept the new connection, but answer its first request with status 503.
    3. If too many connections are being answered with 503, accept no connections until one of them closes.

    After an error of `accept` (for example EMFILE), no connection is accepted for `PAUSE_SECS`.
    """

    def __init__(
        self, service: Service, connection_class: type[Connection], limits: ConnectionLimits, bound: socket.socket
    ) -> None:
        self._service = service
        self._connection_class = connection_class
        self._limits = limits
        self._socket = bound
        self._loop = asyncio.get_running_loop()
        self._served = 0
        self._rejected = 0
        self._by_address = Counter[str]()
        self._connecting: set[asyncio.Task[None]] = set()
        self._accepting = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._warned_at = -_WARN_SECS

    def start(self) -> None:
        """Start accepting connections."""
        self._socket.setblocking(False)
        self._resume()

    async def close(self) -> None:
        """Stop accepting connections. Connections that are already open stay open."""
        self._closed = True
        self._pause()
        if self._timer is not None:
            self._timer.cancel()
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _resume(self) -> None:
        self._timer = None
        if not self._accepting and not self._closed:
            self._accepting = True
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _pause(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._socket.fileno())

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_CALL):
            if self._rejected >= self._limits.rejected:
                self._pause()
                return
            try:
                client, peer = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._warn("cannot accept connections for now: %s", os.strerror(error.errno or 0))
                self._evict(None)
                self._pause()
                self._timer = self._loop.call_later(PAUSE_SECS, self._resume)
                return
            self._serve(client, str(peer[0]))

    def _serve(self, client: socket.socket, address: str) -> None:
        rejected = not self._has_room(address)
        if rejected:
            self._rejected += 1
            same_address = self._by_address[address]
            self._warn("connections are rejected: %d are open, %d of them from %s", self._served, same_address, address)
        else:
            self._served += 1
            self._by_address[address] += 1
        released = partial(self._release, address, rejected)
        connection = self._connection_class(self._service, self._loop, address, released, rejected=rejected)
        task = self._loop.create_task(self._connect(client, connection, released))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, client: socket.socket, connection: Connection, released: partial[None]) -> None:
        try:
            client.setblocking(False)
            await self._loop.connect_accepted_socket(lambda: connection, client)
        except OSError as error:
            client.close()
            released()
            log.info("a connection was lost while it was accepted: %s", error)

    def _has_room(self, address: str) -> bool:
        if self._by_address[address] >= self._limits.per_address:
            return self._evict(address)
        return self._served < self._limits.total or self._evict(None)

    def _evict(self, address: str | None) -> bool:
        """Close the connection that has been idle longest, if it has been idle for at least `IDLE_SECS`.

        Args:
            address: client address whose connections may be closed, or None for all.

        Returns:
            True if a connection was closed.
        """
        latest_idle_start = self._loop.time() - IDLE_SECS
        for connection, since in self._service.idle.items():
            if since > latest_idle_start:
                return False
            if address in (None, connection.address) and connection.evict():
                return True
        return False

    def _release(self, address: str, rejected: bool) -> None:
        if rejected:
            self._rejected -= 1
        else:
            self._served -= 1
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]
        if self._timer is None:
            self._resume()

    def _warn(self, text: str, *details: object) -> None:
        now = self._loop.time()
        if now - self._warned_at >= _WARN_SECS:
            self._warned_at = now
            log.warning(text, *details)
