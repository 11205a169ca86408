"""The gateway's parts, put together for as long as it runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp

from helexa.core.catalogue import Catalogue
from helexa.cortex.config import CortexConfig
from helexa.cortex.fleet import Fleet
from helexa.cortex.loader import Loader
from helexa.cortex.metrics import Metrics
from helexa.cortex.node_client import NodeClient
from helexa.cortex.poller import Poller
from helexa.cortex.proxy import Proxy

# Shorter than the keep-alive of the servers behind, so that they never close a connection just as it is reused.
_KEEPALIVE_SECS = 4.0


@dataclass(frozen=True)
class Gateway:
    """What routes work with."""

    fleet: Fleet
    catalogue: Catalogue
    metrics: Metrics
    proxy: Proxy
    max_body_bytes: int


@asynccontextmanager
async def running(config: CortexConfig, catalogue: Catalogue, metrics: Metrics) -> AsyncIterator[Gateway]:
    """Connect the parts and poll the nodes for as long as the block runs."""
    fleet = Fleet(config.neurons, config.routing)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECS),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
    ) as session:
        client = NodeClient(session)
        loader = Loader(fleet, client, metrics)
        poller = asyncio.create_task(Poller(fleet, client, config.gateway.poll_interval_secs).run())
        proxy = Proxy(session, fleet, catalogue, loader)
        try:
            yield Gateway(fleet, catalogue, metrics, proxy, config.gateway.max_body_mb << 20)
        finally:
            poller.cancel()
            with suppress(asyncio.CancelledError):
                await poller
            await loader.close()
