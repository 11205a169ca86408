"""Accepts connections, and never more than there are file descriptors for."""

import asyncio
import logging
import os
import socket
from collections import Counter
from dataclasses import dataclass
from functools import partial

from helexa.core.logs import quoted
from helexa.http.connection_and_timeouts import ClientConnection
from helexa.http.service_and_memory_budget import Service

MAX_CONNECTIONS = 4096

_RESERVED = 64  # descriptors for listening sockets, databases, logs and the event loop
_MIN_CONNECTIONS = 4


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the number of open connections of one server."""

    total: int  # maximum number of connections whose requests are served
    per_address: int  # maximum number of connections from one client address whose requests are served
    # Maximum number of additional connections, which are accepted only to send them a 503. Further connections wait in
    # the kernel's backlog.
    rejected: int

    @property
    def open(self) -> int:
        """Maximum number of open connections, each of which uses one file descriptor."""
        return self.total + self.rejected

    @classmethod
    def within(
        cls,
        descriptors: int,
        total: int = MAX_CONNECTIONS,
        per_address: int | None = None,
        *,
        each: int = 1,
        other_descriptors: int = 0,
    ) -> "ConnectionLimits":
        """Return limits under which the process does not run out of file descriptors.

        Args:
            descriptors: limit on open files of this process.
            total: maximum number of served connections. It is reduced if there are not enough descriptors, but not
                below `_MIN_CONNECTIONS`, which is also the minimum of `rejected`.
            per_address: maximum number of served connections per client address. None means half of `total`.
            each: number of descriptors per client connection. In a gateway, this number includes connections to nodes.
            other_descriptors: number of descriptors that the process needs for purposes other than client connections.
        """
        rejected_limit = max(_MIN_CONNECTIONS, min(256, descriptors // 8))
        total = max(
            _MIN_CONNECTIONS, min(total, (descriptors - _RESERVED - other_descriptors - rejected_limit) // each)
        )
        # By default, one address may use half of the connections. One client then cannot use all connections, but a
        # reverse proxy, whose many clients share its address, gets enough.
        return cls(total, min(total, per_address or max(1, total // 2)), rejected_limit)


log = logging.getLogger(__name__)

PAUSE_SECS = 0.1

_ACCEPTS_PER_CALL = 32
_WARN_SECS = 60.0


class Acceptor:
    """Accepts connections on a listening socket within limits.

    If a new connection exceeds a limit, the acceptor does the first of these that is possible:

    1. Close the connection that has been idle longest, if it has been idle for at least `EVICTABLE_SECS` (see
       `http/idle_connections.py`). If the limit per client address is exceeded, only connections from the address of
       the new connection are considered.
    2. Accept the new connection, but answer its first request with status 503.
    3. If too many connections are being answered with 503, accept no connections until one of them closes.

    After an error of `accept` (for example EMFILE), no connection is accepted for `PAUSE_SECS`.
    """

    def __init__(
        self, service: Service, connection_class: type[ClientConnection], limits: ConnectionLimits, bound: socket.socket
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
        """Stop accepting connections. The socket and the open connections stay open."""
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
                if self._may_warn():
                    reason = quoted(os.strerror(error.errno or 0))
                    log.warning(
                        "connections not accepted error=%s retry_secs=%s; raise this process's limit of open files",
                        *(reason, PAUSE_SECS),
                    )
                # Closing an idle connection frees a descriptor.
                self._service.idle.evict(None, self._loop.time())
                self._pause()
                self._timer = self._loop.call_later(PAUSE_SECS, self._resume)
                return
            self._serve(client, str(peer[0]))

    def _serve(self, client: socket.socket, address: str) -> None:
        rejected = not self._has_room(address)
        if rejected:
            self._rejected += 1
            if self._may_warn():
                limits = self._limits
                fields = (address, self._served, limits.total, self._by_address[address], limits.per_address)
                log.warning(
                    "connection rejected, because a limit is reached client=%s open=%d limit=%d open_of_client=%d "
                    "limit_per_client=%d; raise the limit of open files, and in a gateway gateway.max_connections or "
                    "gateway.max_connections_per_address",
                    *fields,
                )
        else:
            self._served += 1
            self._by_address[address] += 1
        released = partial(self._release, address, rejected)
        connection = self._connection_class(self._service, self._loop, address, released, rejected=rejected)
        task = self._loop.create_task(self._connect(client, connection, released))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, client: socket.socket, connection: ClientConnection, released: partial[None]) -> None:
        try:
            client.setblocking(False)
            await self._loop.connect_accepted_socket(lambda: connection, client)
        except OSError as error:
            client.close()
            released()
            log.info("connection lost while it was accepted client=%s error=%s", connection.address, quoted(error))

    def _has_room(self, address: str) -> bool:
        if self._by_address[address] >= self._limits.per_address:
            return self._service.idle.evict(address, self._loop.time())
        return self._served < self._limits.total or self._service.idle.evict(None, self._loop.time())

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

    def _may_warn(self) -> bool:
        now = self._loop.time()
        if now - self._warned_at < _WARN_SECS:
            return False
        self._warned_at = now
        return True
