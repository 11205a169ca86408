"""The node's HTTP application, and the server that runs it."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.types import ASGIApp

from helexa.core import logs, tracing
from helexa.core.errors import ConfigError, HelexaError
from helexa.core.logs import quoted, tell
from helexa.http.acceptor import ConnectionLimits
from helexa.http.connection_and_timeouts import ClientConnection
from helexa.http.listener import Listener
from helexa.http.process import collect_seldom, notify, on_reload_signal, on_stop_signals, raise_descriptor_limit
from helexa.neuron.access_guard_and_request_logs import AccessGuard, Interim, RequestMiddleware
from helexa.neuron.config import NeuronConfig
from helexa.neuron.engine_client.process_and_standby import WarmStandby
from helexa.neuron.hardware.device_choice import default_device
from helexa.neuron.hardware.machine_description import broken_driver, overlooked
from helexa.neuron.host_group import Membership
from helexa.neuron.lifecycle.default_models import Activation
from helexa.neuron.lifecycle.load_preparation import max_tensor_parallel
from helexa.neuron.lifecycle.local_inventory import LocalInventory
from helexa.neuron.lifecycle.pulls import Pulls
from helexa.neuron.lifecycle.registry import Registry
from helexa.neuron.processes.sandbox import end_sandboxes
from helexa.neuron.requests.metrics import Metrics, NodeCollector
from helexa.neuron.requests.request_and_run_records import UsageRecords
from helexa.neuron.routes import (
    chat,
    completions,
    health_and_model_list,
    model_management,
    responses,
    tokens_and_embeddings,
)
from helexa.neuron.routes.health_and_model_list import HealthMonitor
from helexa.neuron.routes.replies_disconnects_and_errors import HANDLERS
from helexa.neuron.routes.stored_responses import ResponseStore
from helexa.neuron.sources.hubs_and_sources import Sources

log = logging.getLogger(__name__)

MAX_PROMPT_TOKENS = 131072  # `max_prompt_tokens` in `GET /discovery` if the configuration has none

_DRAIN_POLL_SECONDS = 0.05
_ENDING_SECONDS = 3

_LIVE = ("api_key", "api_key_file", "allowed_hosts", "drain_secs", "log")  # settings that SIGHUP applies at once


def create_app(
    config: NeuronConfig, *, standby: WarmStandby | None = None, group: Membership | None = None
) -> "NodeApp":
    """Return a node's ASGI application, which loads the default models.

    The route functions find their shared objects in `app.state`: `registry`, `inventory`, `pulls`, `default_source`,
    `responses`, `usage`, `activation`, `health`, `metrics`, `port`, `group`, `max_prompt_tokens`, `memory_limit_mb` and
    `max_tensor_parallel`.

    Args:
        standby: starts the engine processes. It may already have started the process of the first default model.
        group: the hosts that compute models together with this node; None if the node has no host group.
    """
    harness = config.harness.torch
    device = harness.device
    if device == "auto":
        device = default_device()
        if device == "cpu" and (reason := overlooked()) is not None:
            log.warning("no accelerator is used device=cpu reason=%s", quoted(reason))
    # `broken_driver` also fills the cache of `discover`, so that later loads need not wait for NVIDIA's driver.
    if device.startswith("cuda") and (reason := broken_driver()) is not None:
        log.error(
            "no model can be loaded device=%s error=%s",
            device,
            quoted(reason),
        )
    engines = standby or WarmStandby()
    sources = Sources(config)
    registry = Registry(config, sources, device=device, group=group, spawn=engines.take)
    activation = Activation(registry, config.default_models)
    inventory = None
    if config.local_models:
        inventory = LocalInventory(config, sources, is_calm=lambda: activation.snapshot().state == "ready")
    pulls = Pulls(config, sources, ended=lambda: None if inventory is None else inventory.changed())
    store = ResponseStore(config.responses)
    monitor = HealthMonitor(
        registry,
        activation,
        local_revision=None if inventory is None else lambda: inventory.revision,
        responses=store.prefix if store.enabled else None,
        memory_limit=harness.memory_limit_mb << 20,
    )

    async def load_default_models() -> None:
        await activation.run()
        await engines.close()  # ends the standby process if no default model took it

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(load_default_models()), asyncio.create_task(monitor.run())]
        if inventory is not None:
            tasks.append(asyncio.create_task(inventory.run()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await pulls.close()
            await registry.close()
            await engines.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    routes = [
        *health_and_model_list.routes,
        *model_management.routes,
        *chat.routes,
        *completions.routes,
        *responses.routes,
        *tokens_and_embeddings.routes,
    ]
    node_metrics = Metrics({route.endpoint: route.path for route in routes})
    node_metrics.watch(NodeCollector(monitor.report, registry.infos, registry.events))
    app = NodeApp(config, node_metrics, routes=routes, exception_handlers=dict(HANDLERS), lifespan=lifespan)
    app.state.registry = registry
    app.state.inventory = inventory
    app.state.pulls = pulls
    app.state.default_source = harness.default_source
    app.state.responses = store
    app.state.usage = UsageRecords()
    app.state.activation = activation
    app.state.health = monitor
    app.state.metrics = node_metrics
    app.state.port = config.port
    app.state.group = group
    bound = harness.context_limit.max_prompt_tokens
    app.state.max_prompt_tokens = bound or harness.context_length or MAX_PROMPT_TOKENS
    app.state.memory_limit_mb = harness.memory_limit_mb or None
    app.state.max_tensor_parallel = partial(max_tensor_parallel, device, harness.tensor_parallel)
    return app


class NodeApp(Starlette):
    """Starlette application that logs, counts and checks every request."""

    def __init__(self, config: NeuronConfig, node_metrics: Metrics, **options: Any) -> None:
        super().__init__(**options)
        self._config = config
        self._metrics = node_metrics
        self._guard: AccessGuard | None = None

    def configure(self, config: NeuronConfig) -> None:
        """Check all later requests against the API key and host names of `config`."""
        self._config = config
        if self._guard is not None:
            self._guard.configure(config)

    def build_middleware_stack(self) -> ASGIApp:
        """Return the application with its middleware, the request log outermost."""
        self._guard = AccessGuard(Interim(super().build_middleware_stack()), self._config)
        return RequestMiddleware(self._guard, self._metrics, self.state.usage)


class NodeConnection(ClientConnection):
    """An HTTP connection that allows for the headers that a gateway adds to a request."""

    max_head_bytes = ClientConnection.max_head_bytes + (8 << 10)
    max_headers = ClientConnection.max_headers + 28


class NodeServer(Listener):
    """Serves the application until SIGTERM or SIGINT; SIGHUP reloads the settings.

    After SIGTERM or SIGINT, the server rejects new requests and waits up to `drain_secs` seconds for running requests.
    Then it stops the engines and exits with code 0. At a second signal, it exits at once with code 1. Engines never
    outlive this process.
    """

    def __init__(self, app: NodeApp, config: NeuronConfig, read: Callable[[], NeuronConfig]) -> None:
        descriptors = raise_descriptor_limit()
        super().__init__(
            app,
            connection=NodeConnection,
            # Half of the file descriptors are reserved for engines and files.
            limits=ConnectionLimits.within(descriptors, other_descriptors=descriptors // 2),
            grace_secs=_ENDING_SECONDS,
        )
        self._node_app = app
        self._registry: Registry = app.state.registry
        self._reloader = Reloader(config, read, self._configure)
        self._drain_secs = config.drain_secs
        self._leaving: asyncio.Task[None] | None = None
        self._exit_code = 0

    def fail(self, exit_code: int) -> None:
        """Stop serving as at SIGTERM, and exit with `exit_code`."""
        self._exit_code = exit_code
        if self._leaving is None:
            self._stop()

    async def serve(self, bound: socket.socket) -> None:
        """Serve on the socket `bound` until SIGTERM or SIGINT, then exit the process."""
        on_stop_signals(self._stop)
        on_reload_signal(self._reloader.reload, self._stop)
        collect_seldom()
        notify("READY=1")  # the socket already accepts connections
        await super().serve(bound)
        tracing.shut_down()
        logging.shutdown()
        end_sandboxes()
        # A normal exit would wait for threads, and a thread may hang in a download.
        os._exit(self._exit_code)

    async def end(self) -> None:
        """Stop all engines; running requests end with an error response."""
        ending = asyncio.create_task(self._registry.close())
        await super().end()
        ending.cancel()

    def _configure(self, config: NeuronConfig) -> None:
        self._node_app.configure(config)
        self._drain_secs = config.drain_secs

    def _stop(self) -> None:
        if self._leaving is not None:
            logging.shutdown()
            end_sandboxes()
            os._exit(1)
        tell(log, logging.INFO, "draining", drain_secs=self._drain_secs)
        notify("STOPPING=1")
        self._registry.drain()
        self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        """Wait up to `drain_secs` for running requests, then stop the server."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_secs):
                while any(model.load().in_flight for model in self._registry.models()):  # noqa: ASYNC110
                    await asyncio.sleep(_DRAIN_POLL_SECONDS)
        self.should_exit = True


class Reloader:
    """Reads the configuration again, and applies settings that can change at run time.

    These settings are `api_key`, `api_key_file`, `allowed_hosts`, `drain_secs` and `log`. Changes of other settings
    take effect at the next start.
    """

    def __init__(
        self, config: NeuronConfig, read: Callable[[], NeuronConfig], apply: Callable[[NeuronConfig], None]
    ) -> None:
        self._config = config
        self._read = read
        self._apply = apply

    def reload(self) -> None:
        """Read and apply the configuration.

        If the configuration is invalid, or lacks an `api_key` although the present one has a key, log an error and keep
        the present configuration.
        """
        try:
            config = self._read().model_copy(update={"host": self._config.host, "port": self._config.port})
            if self._config.api_key is not None and config.api_key is None:
                raise ConfigError(
                    "the configuration has no api_key any more, which would admit all clients; "
                    "to allow this, restart the node"
                )
            logs.configure(config.log.format, config.log.level)
        except HelexaError as error:
            log.error("configuration reload failed error=%s; the node keeps its present configuration", quoted(error))
            return
        names = NeuronConfig.model_fields
        changed = [name for name in names if getattr(config, name) != getattr(self._config, name)]
        self._config = config
        self._apply(config)
        for name in changed:
            if name in _LIVE:
                log.info("setting reloaded setting=%s", name)
            else:
                log.info("changed setting not applied setting=%s; it takes effect at the next start", name)
        if not changed:
            log.info("configuration reloaded; nothing has changed")
