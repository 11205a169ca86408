"""One HTTP server on a socket that is bound already."""

import asyncio
import errno
import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp

from helexa.core.errors import HelexaError
from helexa.http.connection import Connection

_BACKLOG = 2048
_KEEP_ALIVE_SECS = 5


class AddressInUseError(HelexaError):
    """Another process listens there."""


class Listener(uvicorn.Server):
    """Serves an application until `should_exit`; it leaves the signals to its owner.

    Args:
        connection: the kind of its connections.
        grace_secs: that open requests have when it is told to stop.
        keep_alive_secs: that an idle connection stays open.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        connection: type[Connection] = Connection,
        grace_secs: int = 1,
        keep_alive_secs: int = _KEEP_ALIVE_SECS,
    ) -> None:
        self._exit = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                app,
                http=connection,
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=keep_alive_secs,
                timeout_graceful_shutdown=grace_secs,
            )
        )

    @property
    def should_exit(self) -> bool:
        """Whether it is to stop."""
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:  # type: ignore[override]
        if value:
            self._exit.set()

    async def main_loop(self) -> None:
        """Tick once a second, which is for the `date` header, and end at once when told to."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._exit.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none: several servers may share the process."""
        yield


def bind(address: tuple[str, int]) -> socket.socket:
    """A listening socket on a host and port.

    Raises:
        HelexaError: the address is taken or not ours.
    """
    host, port = address
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        families = [found[0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        # Whoever is told `localhost` tries 127.0.0.1; not all try ::1.
        family = socket.AF_INET if socket.AF_INET in families else families[0]
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except UnicodeError:
        raise HelexaError(f"cannot listen on {shown}: there can be no such host") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"cannot listen on {shown}: {os.strerror(errno.EADDRINUSE)}") from None
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise HelexaError(f"cannot listen on {shown}: {reason}") from None


def collect_seldom() -> None:
    """Requests leave no cycles behind that matter; looking for them as often as usual is a twentieth of their cost."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
