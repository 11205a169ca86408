"""Both listeners of a gateway in one event loop: the API and the metrics."""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from helexa.core.catalogue import Catalogue
from helexa.core.errors import HelexaError
from helexa.cortex import gateway
from helexa.cortex.app import create_app
from helexa.cortex.config import Address, CortexConfig
from helexa.cortex.connection import Connection
from helexa.cortex.metrics import Metrics, create_metrics_app

log = logging.getLogger(__name__)

GRACE_SECS = 1
_BACKLOG = 2048


class Listener(uvicorn.Server):
    """One HTTP server on a socket that is bound already; it leaves the signals to its owner."""

    def __init__(self, app: ASGIApp) -> None:
        self._exit = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="auto",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=GRACE_SECS,
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
        """Captures none: two servers share the process."""
        yield


def bind(address: Address) -> socket.socket:
    """A listening socket.

    Raises:
        HelexaError: the address is taken or not ours.
    """
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except UnicodeError:
        raise HelexaError(f"cannot listen on {address}: there can be no such host") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise HelexaError(f"cannot listen on {address}: {reason}") from None


async def serve(config: CortexConfig, catalogue: Catalogue, path: Path | None = None) -> None:
    """Serve until SIGINT or SIGTERM. Streams that are open then are ended after a second.

    Args:
        path: cortex.toml, read anew when it changes.

    Raises:
        HelexaError: an address cannot be listened on, or the ledger cannot be opened.
    """
    metrics = Metrics()
    with ExitStack() as sockets:
        api, scrape = (
            sockets.enter_context(bind(address)) for address in (config.gateway.listen, config.gateway.metrics_listen)
        )
        async with gateway.running(config, catalogue, metrics, path) as running:
            listeners = [Listener(create_app(running)), Listener(create_metrics_app(metrics))]
            _stop_on_signals(listeners)
            _collect_seldom()
            if not config.neurons:
                log.warning("no [[neurons]] configured: every request will be refused")
            addresses = [Address(*bound.getsockname()[:2]) for bound in (api, scrape)]
            log.info("listening on http://%s, metrics on http://%s/metrics", *addresses)
            await asyncio.gather(*(one.serve([bound]) for one, bound in zip(listeners, (api, scrape), strict=True)))


def _collect_seldom() -> None:
    """Requests leave no cycles behind that matter; looking for them as often as usual is a twentieth of their cost."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _stop_on_signals(listeners: list[Listener]) -> None:
    def stop() -> None:
        for listener in listeners:
            listener.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):  # not every system's loop can
            loop.add_signal_handler(number, stop)
