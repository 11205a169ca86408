"""Runs both listeners of a gateway in one event loop: the API and the metrics."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from helexa.core.address import Address
from helexa.core.catalogue import Catalogue
from helexa.core.errors import ConfigError
from helexa.core.logs import tell
from helexa.cortex import gateway
from helexa.cortex.app import create_app
from helexa.cortex.config import CortexConfig
from helexa.cortex.gateway import METRICS_CONNECTIONS, Gateway
from helexa.cortex.observability.metrics import Metrics, create_metrics_app
from helexa.http.descriptor_limit import raise_descriptor_limit
from helexa.http.listener import AddressInUseError, Listener, bind, collect_seldom, on_stop_signals
from helexa.http.service_manager import notify

log = logging.getLogger(__name__)


async def serve(config: CortexConfig, catalogue: Catalogue, path: Path | None = None) -> None:
    """Run the API and metrics listeners until SIGINT or SIGTERM.

    After the signal, the gateway rejects new requests and waits `drain_secs` seconds for running requests. Then it ends
    the requests that still run. A second signal ends them at once.

    Args:
        config: the configuration.
        catalogue: the model catalogue.
        path: path of cortex.toml, which is reloaded when it changes. None if there is no file.

    Raises:
        ConfigError: an address cannot be bound.
        HelexaError: the ledger cannot be opened.
    """
    descriptors = raise_descriptor_limit()
    metrics = Metrics()
    with ExitStack() as sockets:
        api, scrape = (sockets.enter_context(_bind(config, name)) for name in ("listen", "metrics_listen"))
        async with gateway.running(config, catalogue, metrics, path) as running_gateway:
            limits = running_gateway.connection_limits()
            listeners = [
                Listener(create_app(running_gateway), limits=limits, bodies=running_gateway.bodies),
                Listener(create_metrics_app(metrics), limits=METRICS_CONNECTIONS),
            ]
            on_stop_signals(Shutdown(running_gateway, listeners).signal)
            collect_seldom()
            if not config.neurons:
                log.warning("no [[neurons]] configured: every request will be rejected")
            addresses = [Address(*sock.getsockname()[:2]) for sock in (api, scrape)]
            log.info("listening on http://%s, metrics on http://%s/metrics", *addresses)
            log.info("connections=%d per_address=%d open_files=%d", limits.total, limits.per_address, descriptors)
            notify("READY=1")  # both sockets already accept connections
            await asyncio.gather(
                *(listener.serve(sock) for listener, sock in zip(listeners, (api, scrape), strict=True))
            )


def _bind(config: CortexConfig, name: Literal["listen", "metrics_listen"]) -> socket.socket:
    try:
        return bind(getattr(config.gateway, name))
    except AddressInUseError as error:
        raise ConfigError(f"{error}; end the process that uses the address, or change gateway.{name}") from None
    except ConfigError as error:
        raise ConfigError(f"{error}; change gateway.{name}") from None


class Shutdown:
    """Ends a gateway's listeners after its running requests.

    Args:
        gateway: the running gateway.
        listeners: the listeners to shut down.
    """

    def __init__(self, gateway: Gateway, listeners: Sequence[Listener]) -> None:
        self._gateway = gateway
        self._listeners = listeners
        self._draining: asyncio.Task[None] | None = None

    def signal(self) -> None:
        """Begin the drain at the first signal, and end the listeners at the second signal."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:
            self._end()

    async def _drain(self) -> None:
        secs = self._gateway.config.gateway.drain_secs
        tell(log, logging.INFO, "draining", drain_secs=secs)
        notify("STOPPING=1")
        if left := await self._gateway.drain.run(secs):
            tell(log, logging.WARNING, "drain timed out", drain_secs=secs, requests=left)
        self._end()

    def _end(self) -> None:
        for listener in self._listeners:
            listener.should_exit = True
