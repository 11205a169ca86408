"""One HTTP server on a socket that is bound already."""

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
from contextlib import suppress

from starlette.types import ASGIApp

from helexa.core.errors import HelexaError
from helexa.http.body_budget import BodyBudget
from helexa.http.connections.acceptor import Acceptor
from helexa.http.connections.connection import Connection
from helexa.http.connections.connection_limits import ConnectionLimits
from helexa.http.connections.tcp_keep_alive import enable_tcp_keep_alive
from helexa.http.descriptor_limit import descriptor_limit
from helexa.http.lifespan import Lifespan
from helexa.http.service import Service

log = logging.getLogger(__name__)

_BACKLOG = 2048
# Longer than reverse proxies (nginx, AWS: 60) and gateways (4) keep an idle connection: a server that closes first can
# close just as the next request comes, and a proxy that gets no response to a POST answers 502.
_KEEP_ALIVE_SECS = 75
_LAST_WORDS_SECS = 1


class AddressInUseError(HelexaError):
    """Another process listens there."""


class Listener:
    """Serves an application until it is told to exit; signals are its owner's.

    Args:
        connection: the kind of its connections.
        limits: of its connections; None for those that fit the descriptors of this process.
        bodies: the memory for request bodies, `body_budget.DEFAULT_BYTES` if None.
        grace_secs: that open requests have when it is told to exit.
        keep_alive_secs: that an idle connection stays open.

    Attributes:
        started: it listens, or did.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        connection: type[Connection] = Connection,
        limits: ConnectionLimits | None = None,
        bodies: BodyBudget | None = None,
        grace_secs: float = 1,
        keep_alive_secs: float = _KEEP_ALIVE_SECS,
    ) -> None:
        self.started = False
        self._connection = connection
        self._grace_secs = grace_secs
        self._limits = limits or ConnectionLimits.within(descriptor_limit())
        self._service = Service(app, keep_alive_secs, bodies or BodyBudget())
        self._exit = asyncio.Event()

    @property
    def should_exit(self) -> bool:
        """Whether it is to exit."""
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._exit.set()

    async def serve(self, bound: socket.socket) -> None:
        """Listen on a bound socket, which is closed in the end.

        Raises:
            HelexaError: the application could not begin or end.
        """
        service = self._service
        lifespan = Lifespan(service.app)
        with bound:
            await lifespan.begin()
            acceptor = Acceptor(service, self._connection, self._limits, bound)
            acceptor.start()
            self.started = True
            try:
                await self._exit.wait()
            finally:
                await acceptor.close()
        await self.end()
        await lifespan.end()

    async def end(self) -> None:
        """End all connections: idle ones at once, others when their requests have had their time."""
        service = self._service
        service.stopping = True
        for connection in list(service.connections):
            connection.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._grace_secs):
                if service.connections:
                    await service.all_gone.wait()
                if service.tasks:
                    await asyncio.wait(service.tasks)
        if service.tasks:
            log.error(
                "%d requests are ended: they had %s s after the end was told", len(service.tasks), self._grace_secs
            )
            for task in service.tasks:
                task.cancel()
            await asyncio.wait(service.tasks, timeout=_LAST_WORDS_SECS)
        for connection in list(service.connections):
            connection.close()


def bind(address: tuple[str, int]) -> socket.socket:
    """A listening socket on a host and port.

    Raises:
        HelexaError: the address is taken or not ours.
    """
    host, port = address
    display_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        families = [entry[0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        # Whoever is told `localhost` tries 127.0.0.1; not all try ::1.
        family = socket.AF_INET if socket.AF_INET in families else families[0]
        server_socket = socket.create_server(address, family=family, backlog=_BACKLOG)
    except UnicodeError:
        raise HelexaError(f"cannot listen on {display_address}: there can be no such host") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"cannot listen on {display_address}: {os.strerror(errno.EADDRINUSE)}") from None
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise HelexaError(f"cannot listen on {display_address}: {reason}") from None
    enable_tcp_keep_alive(server_socket)  # inherited by the connections that are accepted
    return server_socket


def collect_seldom() -> None:
    """Requests leave no cycles behind that matter; looking for them as often as usual is a twentieth of their cost."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def stop_on_signals(*listeners: Listener) -> None:
    """Stop them at SIGINT and SIGTERM."""

    def stop() -> None:
        for listener in listeners:
            listener.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):  # not every system's loop can
            loop.add_signal_handler(number, stop)
