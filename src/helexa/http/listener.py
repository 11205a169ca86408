"""An HTTP server for an ASGI application on a listening socket."""

import asyncio
import errno
import logging
import os
import socket
from contextlib import suppress

from starlette.types import ASGIApp, Message

from helexa.core.errors import ConfigError, HelexaError
from helexa.http.acceptor import Acceptor, ConnectionLimits
from helexa.http.connection_and_timeouts import ClientConnection
from helexa.http.idle_connections import KEEP_ALIVE_SECS, enable_tcp_keep_alive
from helexa.http.process import descriptor_limit, on_stop_signals
from helexa.http.service_and_memory_budget import BodyBudget, Service

log = logging.getLogger(__name__)

_BACKLOG = 2048
_CANCEL_SECS = 1  # maximum time that a shutdown waits for canceled requests


class AddressInUseError(ConfigError):
    """Another process already listens on the address."""


class Listener:
    """Serves an ASGI application until `should_exit` is set.

    The listener installs no signal handlers; call `stop_on_signals` for that.

    Args:
        connection: class that handles connections.
        limits: limits on open connections, or None to derive them from the process's limit on open files.
        bodies: memory limit for request bodies, or None for `service_and_memory_budget.DEFAULT_BYTES`.
        grace_secs: seconds for which a shutdown waits for requests in progress.
        keep_alive_secs: seconds after which an idle connection is closed.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        connection: type[ClientConnection] = ClientConnection,
        limits: ConnectionLimits | None = None,
        bodies: BodyBudget | None = None,
        grace_secs: float = 1,
        keep_alive_secs: float = KEEP_ALIVE_SECS,
    ) -> None:
        self.started = False  # True once the server accepts connections
        self._connection = connection
        self._grace_secs = grace_secs
        self._limits = limits or ConnectionLimits.within(descriptor_limit())
        self._service = Service(app, keep_alive_secs, bodies or BodyBudget())
        self._exit = asyncio.Event()

    @property
    def should_exit(self) -> bool:
        """Whether the server shuts down. True starts a shutdown, which cannot be revoked."""
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._exit.set()

    async def serve(self, bound: socket.socket) -> None:
        """Serve until `should_exit` is set, then shut down. The socket `bound` is closed.

        Raises:
            HelexaError: the application failed to start or to shut down.
            Exception: the application itself raised this exception, and sent no reply.
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
        """Close idle connections now, and other connections after their responses.

        Requests that are not finished after the grace period are canceled.
        """
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
                "running requests canceled at shutdown requests=%d seconds=%s; the requests did not end in this time, "
                "and their clients get an error",
                len(service.tasks),
                self._grace_secs,
            )
            for task in service.tasks:
                task.cancel()
            await asyncio.wait(service.tasks, timeout=_CANCEL_SECS)
        for connection in list(service.connections):
            connection.close()


def bind(address: tuple[str, int]) -> socket.socket:
    """Return a listening socket for `address`, a pair of host and port.

    If the host has IPv4 and IPv6 addresses, only IPv4 is used.

    Raises:
        AddressInUseError: another process listens on the address.
        ConfigError: the host name is invalid, or this process cannot listen on the address.
    """
    host, port = address
    display_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        families = [info[0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        # All clients try 127.0.0.1 for `localhost`; some do not try ::1.
        family = socket.AF_INET if socket.AF_INET in families else families[0]
        bound = socket.create_server(address, family=family, backlog=_BACKLOG)
    except UnicodeError:
        raise ConfigError(f"cannot listen on {display_address}: the host name is invalid") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"cannot listen on {display_address}: {os.strerror(errno.EADDRINUSE)}") from None
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise ConfigError(f"cannot listen on {display_address}: {reason}") from None
    enable_tcp_keep_alive(bound)  # accepted connections inherit the setting
    return bound


def stop_on_signals(listener: Listener) -> None:
    """Shut the listener down at SIGINT or SIGTERM. Needs a running event loop."""
    on_stop_signals(lambda: setattr(listener, "should_exit", True))


_RETURN_SECS = 1.0


class Lifespan:
    """Sends lifespan events (startup, shutdown) to an ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._events: asyncio.Queue[Message] = asyncio.Queue()
        self._acknowledgements: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Start the application, and wait until it is ready.

        Raises:
            HelexaError: the application failed to start.
        """
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
        self._task = asyncio.ensure_future(self._run(scope))
        await self._send_event("startup")

    async def end(self) -> None:
        """Shut the application down, and wait at most `_RETURN_SECS` for its return.

        Raises:
            HelexaError: the application failed to shut down.
        """
        await self._send_event("shutdown")
        assert self._task is not None
        await asyncio.wait((self._task,), timeout=_RETURN_SECS)

    async def _run(self, scope: Message) -> None:
        await self._app(scope, self._events.get, self._acknowledgements.put)

    async def _send_event(self, phase: str) -> None:
        assert self._task is not None
        self._events.put_nowait({"type": f"lifespan.{phase}"})
        acknowledgement = asyncio.ensure_future(self._acknowledgements.get())
        await asyncio.wait((acknowledgement, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not acknowledgement.done():
            acknowledgement.cancel()
            self._task.result()
            raise HelexaError(f"the application ended during {phase}; see the log of this server")
        message = acknowledgement.result()
        if message["type"] != f"lifespan.{phase}.complete":
            raise HelexaError(
                message.get("message") or f"the application failed during {phase}; see the log of this server"
            )
