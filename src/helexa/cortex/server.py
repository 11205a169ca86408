"""Runs both listeners of a gateway in one event loop: the API and the metrics."""

import asyncio
import logging
from contextlib import ExitStack
from pathlib import Path

from helexa.core.address import Address
from helexa.core.catalogue import Catalogue
from helexa.cortex import gateway
from helexa.cortex.app import create_app
from helexa.cortex.config import CortexConfig
from helexa.cortex.gateway import METRICS_CONNECTIONS
from helexa.cortex.observability.metrics import Metrics, create_metrics_app
from helexa.http.descriptor_limit import raise_descriptor_limit
from helexa.http.listener import Listener, bind, collect_seldom, stop_on_signals

log = logging.getLogger(__name__)


async def serve(config: CortexConfig, catalogue: Catalogue, path: Path | None = None) -> None:
    """Run the API and metrics listeners until SIGINT or SIGTERM.

    Streams that are still open one second after the signal are ended.

    Args:
        config: the configuration.
        catalogue: the model catalogue.
        path: path of cortex.toml, which is reloaded when it changes. None if there is no file.

    Raises:
        HelexaError: an address cannot be bound, or the ledger cannot be opened.
    """
    descriptors = raise_descriptor_limit()
    metrics = Metrics()
    with ExitStack() as sockets:
        api, scrape = (
            sockets.enter_context(bind(address)) for address in (config.gateway.listen, config.gateway.metrics_listen)
        )
        async with gateway.running(config, catalogue, metrics, path) as running_gateway:
            limits = running_gateway.connection_limits()
            listeners = [
                Listener(create_app(running_gateway), limits=limits, bodies=running_gateway.bodies),
                Listener(create_metrics_app(metrics), limits=METRICS_CONNECTIONS),
            ]
            stop_on_signals(*listeners)
            collect_seldom()
            if not config.neurons:
                log.warning("no [[neurons]] configured: every request will be rejected")
            addresses = [Address(*sock.getsockname()[:2]) for sock in (api, scrape)]
            log.info("listening on http://%s, metrics on http://%s/metrics", *addresses)
            log.info("connections=%d per_address=%d open_files=%d", limits.total, limits.per_address, descriptors)
            await asyncio.gather(
                *(listener.serve(sock) for listener, sock in zip(listeners, (api, scrape), strict=True))
            )
