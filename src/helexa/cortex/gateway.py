"""Creates, connects and closes the components of a gateway."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from helexa.core.catalogue import Catalogue
from helexa.cortex.access.auth import Authenticator
from helexa.cortex.access.client_address import TrustedProxies
from helexa.cortex.access.exposure import check_exposure
from helexa.cortex.access.key import static_keys
from helexa.cortex.access.rate_limiter import RateLimiter
from helexa.cortex.config import CortexConfig
from helexa.cortex.fleet.capabilities import sees_images
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.fleet_metrics import FleetCollector
from helexa.cortex.fleet.node_client import NodeClient
from helexa.cortex.fleet.poller import Poller
from helexa.cortex.forwarding.node_calls import NodeCalls
from helexa.cortex.forwarding.prompt_count import PromptCounter
from helexa.cortex.forwarding.proxy import Proxy
from helexa.cortex.images.preparation import ImagePreparation, PreparedBody
from helexa.cortex.ledger.activity import Activity
from helexa.cortex.ledger.keys import Keyring, KeyStore
from helexa.cortex.ledger.ledger import Ledger
from helexa.cortex.ledger.storage.backends import open_database
from helexa.cortex.ledger.storage.database import Database
from helexa.cortex.lifecycle.lifecycle import Lifecycle
from helexa.cortex.observability.gateway_state import GatewayCollector
from helexa.cortex.observability.metrics import Metrics
from helexa.cortex.observability.request_record import RequestRecord
from helexa.cortex.reload import Reloader
from helexa.cortex.requests.body_workers import BodyWorkers
from helexa.cortex.upstream.client import KEEPALIVE_SECS, MAX_IDLE, Upstream
from helexa.http.body_budget import BodyBudget
from helexa.http.connections.connection_limits import ConnectionLimits
from helexa.http.descriptor_limit import descriptor_limit
from helexa.http.drain import Drain

METRICS_CONNECTIONS = ConnectionLimits(total=32, per_address=32, rejected=4)


class Gateway:
    """The components of a running gateway, shared by all routes.

    Attributes:
        config: the current configuration.
        catalogue: the current model catalogue.
        bodies: the memory limit for all concurrent request bodies, which the API's listener enforces.
        proxies: the trusted reverse proxies, which tell the addresses of clients.
        drain: the running requests, which a shutdown waits for.
        observers: functions that are called with every finished request.
    """

    def __init__(
        self,
        config: CortexConfig,
        catalogue: Catalogue,
        metrics: Metrics,
        *,
        session: aiohttp.ClientSession,
        database: Database,
    ) -> None:
        self.config = config
        self._started = config.gateway
        self.catalogue = catalogue
        self.metrics = metrics
        self.fleet = Fleet(config.neurons, config.routing)
        self.client = NodeClient(session)
        self.poller = Poller(self.fleet, self.client, config.gateway.poll_interval_secs)
        self.upstream = Upstream(
            config.gateway.idle_timeout_secs, config.gateway.answer_timeout_secs, max_idle=_max_idle_upstream()
        )
        self.body_workers = BodyWorkers()
        self.proxy = Proxy(self.upstream, self.fleet, self.body_workers)
        self.calls = NodeCalls(self.upstream, self.fleet)
        self.bodies = BodyBudget(config.gateway.body_memory_bytes)
        self.images = ImagePreparation(config.images, self.body_workers, self.bodies)
        self.counter = PromptCounter(self.calls, self.body_workers)
        self.lifecycle = Lifecycle(
            self.fleet, self.client, config, catalogue, loaded=metrics.cold_start, evicted=metrics.eviction
        )
        self.rate_limiter = RateLimiter()
        self.drain = Drain()
        self.proxies = TrustedProxies(config.gateway.trusted_proxies)
        self.authenticator = Authenticator(config.entitlements.require_auth, static_keys(config.entitlements))
        self.keyring = Keyring(KeyStore(database), self.authenticator)
        self.ledger = Ledger(database)
        self.observers: list[Callable[[Activity], None]] = []
        metrics.watch(FleetCollector(self.fleet))
        metrics.watch(GatewayCollector(self.drain, lambda: self.ledger.available))

    def connection_limits(self) -> ConnectionLimits:
        """Return the connection limits of the API's listener.

        The limits are those of the configuration, reduced if the process's limit on open files is too low. Each client
        connection counts as two file descriptors, because its request may need a connection to a node.
        """
        section = self._started
        return ConnectionLimits.within(
            descriptor_limit(),
            section.max_connections,
            section.max_connections_per_address,
            each=2,
            other_descriptors=_max_idle_upstream() + METRICS_CONNECTIONS.open,
        )

    @property
    def max_body_bytes(self) -> int:
        """Maximum length of a request body in bytes."""
        return self.config.gateway.max_body_mb << 20

    def prepared_images(self, model: str, body: bytes) -> AbstractAsyncContextManager[PreparedBody]:
        """Check and fetch the images of a request body for `model`. See `ImagePreparation.prepared`."""
        vision = sees_images(self.fleet.view(), self.catalogue, model)
        return self.images.prepared(body, model, sees_images=vision, max_body_bytes=self.max_body_bytes)

    def configure(self, config: CortexConfig, catalogue: Catalogue) -> None:
        """Apply a new configuration and catalogue.

        Changes of listeners, CORS origins and the ledger take effect only at the next start.

        Raises:
            ConfigError: the configuration is inconsistent. The gateway keeps the previous configuration.
        """
        keys = static_keys(config.entitlements)
        check_exposure(config.model_copy(update={"gateway": self._started}))  # the address does not change
        self.authenticator.configure(config.entitlements.require_auth, keys)
        self.config, self.catalogue = config, catalogue
        self.fleet.configure(config.neurons)
        self.fleet.set_routing(config.routing)
        self.proxies = TrustedProxies(config.gateway.trusted_proxies)
        self.images.configure(config.images)
        self.bodies.total = config.gateway.body_memory_bytes
        self.poller.interval_secs = config.gateway.poll_interval_secs
        self.upstream.idle_timeout_secs = config.gateway.idle_timeout_secs
        self.upstream.answer_timeout_secs = config.gateway.answer_timeout_secs
        self.lifecycle.configure(config, catalogue)

    def observe(self, record: RequestRecord) -> None:
        """Add a finished request to the metrics and to the ledger's activity log, and call the observers."""
        self.metrics.observe(record)
        activity = record.activity()
        self.ledger.record(activity)
        for observe in self.observers:
            observe(activity)


@asynccontextmanager
async def running(
    config: CortexConfig, catalogue: Catalogue, metrics: Metrics, path: Path | None = None
) -> AsyncIterator[Gateway]:
    """Start the components of a gateway, yield the gateway, and stop the components when the block ends.

    Args:
        config: the configuration.
        catalogue: the model catalogue.
        metrics: the metrics of the gateway.
        path: path of cortex.toml, which is reloaded when it changes. None if there is no file.

    Raises:
        HelexaError: the database cannot be opened, or is in exclusive use by another gateway.
    """
    async with AsyncExitStack() as stack:
        database = await open_database(config.ledger.url.get_secret_value())
        stack.push_async_callback(database.close)
        await database.migrate()
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECS),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            )
        )
        gateway = Gateway(config, catalogue, metrics, session=session, database=database)
        stack.callback(gateway.upstream.close)
        stack.push_async_callback(gateway.body_workers.close)
        await gateway.ledger.start()
        stack.push_async_callback(gateway.ledger.close)
        await stack.enter_async_context(gateway.keyring.watching())
        stack.push_async_callback(gateway.lifecycle.close)
        reloader = Reloader(path, config, catalogue, gateway.configure)
        for coroutine in (gateway.poller.run(), gateway.lifecycle.run(), reloader.run()):
            stack.push_async_callback(_stop, asyncio.create_task(coroutine))
        yield gateway


def _max_idle_upstream() -> int:
    return min(MAX_IDLE, descriptor_limit() // 8)


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
