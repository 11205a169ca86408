"""Both listeners of a gateway in one event loop: the API and the metrics."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from helexa.core.catalogue import Catalogue
from helexa.core.errors import HelexaError
from helexa.cortex import gateway
from helexa.cortex.app import create_app
from helexa.cortex.config import Address, CortexConfig
from helexa.cortex.metrics import Metrics, create_metrics_app

log = logging.getLogger(__name__)

GRACE_SECS = 1
_BACKLOG = 2048


class _Corked:
    """A transport that sends in one piece what is written within one turn of the event loop: head and body of an answer
    then cost one system call instead of two."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and not self._transport.is_closing():
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))


class _Protocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, _Corked(cast(asyncio.Transport, transport))))


class Listener(uvicorn.Server):
    """One HTTP server on a socket that is bound already; it leaves the signals to its owner."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
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
            if not config.neurons:
                log.warning("no [[neurons]] configured: every request will be refused")
            addresses = [Address(*bound.getsockname()[:2]) for bound in (api, scrape)]
            log.info("listening on http://%s, metrics on http://%s/metrics", *addresses)
            await asyncio.gather(*(one.serve([bound]) for one, bound in zip(listeners, (api, scrape), strict=True)))


def _stop_on_signals(listeners: list[Listener]) -> None:
    def stop() -> None:
        for listener in listeners:
            listener.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):  # not every system's loop can
            loop.add_signal_handler(number, stop)
