"""The gateway's parts, put together for as long as it runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp

from helexa.core.catalogue import Catalogue
from helexa.cortex.auth import Gatekeeper
from helexa.cortex.config import CortexConfig
from helexa.cortex.exchange import Exchange
from helexa.cortex.fleet import Fleet
from helexa.cortex.key import static_keys
from helexa.cortex.limits import Limits
from helexa.cortex.loader import Loader
from helexa.cortex.metrics import Metrics
from helexa.cortex.node_client import NodeClient
from helexa.cortex.poller import Poller
from helexa.cortex.proxy import Proxy
from helexa.cortex.upstream import KEEPALIVE_SECS, Upstream


class Gateway:
    """What routes work with.

    Attributes:
        config: as it was read last.
        catalogue: as it was read last.
    """

    def __init__(
        self,
        config: CortexConfig,
        catalogue: Catalogue,
        metrics: Metrics,
        *,
        fleet: Fleet,
        loader: Loader,
        upstream: Upstream,
    ) -> None:
        self.config = config
        self.catalogue = catalogue
        self.metrics = metrics
        self.fleet = fleet
        self.loader = loader
        self.proxy = Proxy(upstream, fleet)
        self.gatekeeper = Gatekeeper(config.entitlements.require_auth, static_keys(config.entitlements))
        self.limits = Limits()

    @property
    def max_body_bytes(self) -> int:
        """Longest request body."""
        return self.config.gateway.max_body_mb << 20

    def observe(self, exchange: Exchange) -> None:
        """Take note of a request that ended."""
        self.metrics.observe(exchange)


@asynccontextmanager
async def running(config: CortexConfig, catalogue: Catalogue, metrics: Metrics) -> AsyncIterator[Gateway]:
    """Connect the parts and poll the nodes for as long as the block runs."""
    fleet = Fleet(config.neurons, config.routing)
    upstream = Upstream()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECS),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
    ) as session:
        client = NodeClient(session)
        loader = Loader(fleet, client, metrics)
        poller = asyncio.create_task(Poller(fleet, client, config.gateway.poll_interval_secs).run())
        try:
            yield Gateway(config, catalogue, metrics, fleet=fleet, loader=loader, upstream=upstream)
        finally:
            poller.cancel()
            with suppress(asyncio.CancelledError):
                await poller
            await loader.close()
            upstream.close()
