"""Creates, connects and closes the components of a gateway."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from helexa.core.catalog import Catalog
from helexa.core.logs import LogLines
from helexa.cortex.access.auth import Authenticator
from helexa.cortex.access.keys import static_keys
from helexa.cortex.access.proxies_exposure_and_cors import TrustedProxies, check_exposure
from helexa.cortex.access.rate_limiter import RateLimiter
from helexa.cortex.config import CortexConfig, NeuronSection, secrets_of
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.fleet_view import sees_images
from helexa.cortex.fleet.node_client import NodeClient
from helexa.cortex.fleet.node_errors import CONNECT_TIMEOUT_SECS
from helexa.cortex.fleet.poller import Poller
from helexa.cortex.fleet_history import History
from helexa.cortex.forwarding.proxy_and_cancellation import Proxy
from helexa.cortex.forwarding.request_body_limit_and_workers import BodyWorkers
from helexa.cortex.forwarding.token_queries import NodeCalls
from helexa.cortex.ledger.activity_and_usage_totals import Activity
from helexa.cortex.ledger.keys_and_nodes import JoinedNode, KeyStore, NodeStore
from helexa.cortex.ledger.ledger import Ledger
from helexa.cortex.ledger.storage import open_database
from helexa.cortex.ledger.storage.database import Database
from helexa.cortex.lifecycle.lifecycle import Lifecycle
from helexa.cortex.lifecycle.pulls import Pulls
from helexa.cortex.metrics import FleetCollector, GatewayCollector, Metrics
from helexa.cortex.node_join import Joins
from helexa.cortex.reload import Reloader
from helexa.cortex.request_images import ImagePreparation, PreparedBody
from helexa.cortex.request_record import RequestRecord
from helexa.cortex.shutdown import Drain
from helexa.cortex.upstream.client import MAX_IDLE, Upstream
from helexa.cortex.upstream.tls import client_context
from helexa.http.acceptor import ConnectionLimits
from helexa.http.process import descriptor_limit
from helexa.http.service_and_memory_budget import BodyBudget

METRICS_CONNECTIONS = ConnectionLimits(total=32, per_address=32, rejected=4)


class Gateway:
    """The components of a running gateway, shared by all routes."""

    # Python 3.11 reads attributes slowly if an object has 30 or more and its class has no slots. Without slots, a
    # request would need 2 % more CPU time.
    __slots__ = (
        "_joined",
        "_started",
        "_started_ollama",
        "authenticator",
        "bodies",
        "body_workers",
        "calls",
        "catalog",
        "client",
        "config",
        "config_file",
        "drain",
        "fleet",
        "history",
        "images",
        "joins",
        "key_store",
        "ledger",
        "lifecycle",
        "log_lines",
        "management",
        "metrics",
        "node_store",
        "observers",
        "poller",
        "proxies",
        "proxy",
        "pulls",
        "rate_limiter",
        "reload",
        "upstream",
    )

    def __init__(
        self,
        config: CortexConfig,
        catalog: Catalog,
        metrics: Metrics,
        *,
        database: Database,
        config_file: Path | None = None,
    ) -> None:
        self.config = config
        # Path of cortex.toml. None if the configuration comes only from environment variables.
        self.config_file = config_file
        # The sections `[gateway]` and `[ollama]` at the start. Their addresses and connection limits stay in use after
        # a reload.
        self._started, self._started_ollama = config.gateway, config.ollama
        self.catalog = catalog
        self.metrics = metrics
        self.fleet = Fleet(config.neurons, config.routing)
        self.fleet.serve_local(config.gateway.local_models)
        tls = client_context(config.gateway.ca_file)
        # A load may take hours without an answer, so the timeouts of requests must not apply to management calls.
        self.management = Upstream(tls=tls, connect_timeout_secs=CONNECT_TIMEOUT_SECS)
        self.client = NodeClient(self.management)
        self.poller = Poller(self.fleet, self.client, config.gateway.poll_interval_secs)
        self.upstream = Upstream(
            config.gateway.idle_timeout_secs,
            config.gateway.answer_timeout_secs,
            max_idle=_max_idle_upstream(),
            tls=tls,
        )
        self.body_workers = BodyWorkers()
        self.proxy = Proxy(self.upstream, self.fleet, self.body_workers)
        self.calls = NodeCalls(self.upstream, self.fleet, self.body_workers)
        # the memory limit for all concurrent request bodies, which the API's listener enforces
        self.bodies = BodyBudget(config.gateway.body_memory_bytes)
        self.images = ImagePreparation(config.images, self.body_workers, self.bodies)
        self.lifecycle = Lifecycle(
            self.fleet, self.client, config, catalog, loaded=metrics.cold_start, evicted=metrics.eviction
        )
        self.pulls = Pulls(self.fleet, self.client, self.poller)
        self.rate_limiter = RateLimiter()
        self.drain = Drain()  # the running requests, which a shutdown waits for
        # the trusted reverse proxies, whose headers name the addresses of clients
        self.proxies = TrustedProxies(config.gateway.trusted_proxies)
        self.authenticator = Authenticator(config.entitlements.require_auth, static_keys(config.entitlements))
        self.key_store = KeyStore(database, apply=self.authenticator.replace)
        self.ledger = Ledger(database)
        self.history = History(self.fleet.view)
        self._joined: Sequence[JoinedNode] = ()
        self.log_lines = LogLines(
            lambda: (*secrets_of(self.config), *(node.bearer.get_secret_value() for node in self._joined))
        )
        self.node_store = NodeStore(database, apply=self._use_joined)
        self.joins = Joins(
            self.node_store,
            self.client,
            lambda: [(node.name, node.endpoint) for node in self.fleet.view().nodes],
            metrics.node_join,
        )
        self.observers: list[Callable[[Activity], None]] = []  # functions that are called with every finished request
        self.reload: Callable[[], None] = lambda: None  # reads the configuration again; the function `running` sets it
        metrics.watch(FleetCollector(self.fleet))
        metrics.watch(GatewayCollector(self.drain, lambda: self.ledger.available))

    def connection_limits(self) -> ConnectionLimits:
        """Return the connection limits of each listener of the API.

        The limits are those of the configuration, reduced if the process's limit on open files is too low.
        """
        section = self._started
        return ConnectionLimits.within(
            descriptor_limit(),
            section.max_connections,
            section.max_connections_per_address,
            # A connection needs a second descriptor if its request is forwarded to a node. If `ollama.listen` is set,
            # there are two listeners with these limits.
            each=2 if self._started_ollama.listen is None else 4,
            other_descriptors=_max_idle_upstream() + METRICS_CONNECTIONS.open,
        )

    @property
    def max_body_bytes(self) -> int:
        """Maximum length of a request body in bytes."""
        return self.config.gateway.max_body_mb << 20

    def prepared_images(self, model: str, body: bytes) -> AbstractAsyncContextManager[PreparedBody]:
        """Check and fetch the images of a request body (see `ImagePreparation.prepared`)."""
        vision = sees_images(self.fleet.view(), self.catalog, model)
        return self.images.prepared(body, model, sees_images=vision, max_body_bytes=self.max_body_bytes)

    def configure(self, config: CortexConfig, catalog: Catalog) -> None:
        """Apply a new configuration and catalog.

        Changes of listeners, CORS origins, `ca_file` and the ledger take effect only at the next start.

        Raises:
            ConfigError: the configuration is inconsistent. The gateway keeps the previous configuration.
        """
        keys = static_keys(config.entitlements)
        # The gateway still listens at the addresses of the start, so these addresses are checked.
        started = {"gateway": self._started, "ollama": self._started_ollama}
        check_exposure(config.model_copy(update=started))
        self.authenticator.configure(config.entitlements.require_auth, keys)
        self.config, self.catalog = config, catalog
        self._configure_fleet()
        self.fleet.set_routing(config.routing)
        self.fleet.serve_local(config.gateway.local_models)
        self.proxies = TrustedProxies(config.gateway.trusted_proxies)
        self.images.configure(config.images)
        self.bodies.total = config.gateway.body_memory_bytes
        self.poller.interval_secs = config.gateway.poll_interval_secs
        self.upstream.timeouts.idle_secs = config.gateway.idle_timeout_secs
        self.upstream.timeouts.answer_secs = config.gateway.answer_timeout_secs
        self.lifecycle.configure(config, catalog)

    def _use_joined(self, nodes: Sequence[JoinedNode]) -> None:
        self._joined = nodes
        self._configure_fleet()

    def _configure_fleet(self) -> None:
        """Use the nodes of the configuration, and the nodes that joined."""
        names = {neuron.name for neuron in self.config.neurons}
        endpoints = {neuron.endpoint for neuron in self.config.neurons}
        # A configured node replaces a joined node that has the same name or the same endpoint.
        joined = [
            NeuronSection(name=node.name, endpoint=node.endpoint, bearer=node.bearer)
            for node in self._joined
            if node.name not in names and node.endpoint not in endpoints
        ]
        self.fleet.configure([*self.config.neurons, *joined], {node.name for node in joined})

    def observe(self, record: RequestRecord) -> None:
        """Pass a finished request to metrics, ledger, history and observers."""
        self.metrics.observe(record)
        activity = record.activity()
        self.ledger.record(activity)
        self.history.observe(activity)
        for observe in self.observers:
            observe(activity)


@asynccontextmanager
async def running(
    config: CortexConfig, catalog: Catalog, metrics: Metrics, path: Path | None = None
) -> AsyncIterator[Gateway]:
    """Run the components of a gateway until the block ends.

    Args:
        path: path of cortex.toml, which is reloaded when it changes. None if there is no file.

    Raises:
        HelexaError, or a subclass: the database cannot be opened, or another gateway has exclusive use of it.
    """
    async with AsyncExitStack() as stack:
        database = await open_database(config.ledger.url.get_secret_value())
        stack.push_async_callback(database.close)
        await database.migrate()
        gateway = Gateway(config, catalog, metrics, database=database, config_file=path)
        logging.getLogger().addHandler(gateway.log_lines)
        stack.callback(logging.getLogger().removeHandler, gateway.log_lines)
        stack.callback(gateway.upstream.close)
        stack.callback(gateway.management.close)
        stack.push_async_callback(gateway.body_workers.close)
        await gateway.ledger.start()
        stack.push_async_callback(gateway.ledger.close)
        await stack.enter_async_context(gateway.key_store.watching())
        await stack.enter_async_context(gateway.node_store.watching())
        stack.push_async_callback(gateway.lifecycle.close)
        reloader = Reloader(path, config, catalog, gateway.configure)
        gateway.reload = reloader.request
        for coroutine in (gateway.poller.run(), gateway.lifecycle.run(), gateway.history.run(), reloader.run()):
            stack.push_async_callback(_stop, asyncio.create_task(coroutine))
        yield gateway


def _max_idle_upstream() -> int:
    return min(MAX_IDLE, descriptor_limit() // 8)


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
