"""The node's HTTP application (routes, state and background tasks) and the server that runs it."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.types import ASGIApp

from helexa.core import tracing
from helexa.core.logs import tell
from helexa.http.connections.connection import Connection
from helexa.http.connections.connection_limits import ConnectionLimits
from helexa.http.descriptor_limit import raise_descriptor_limit
from helexa.http.listener import Listener, collect_seldom, on_stop_signals
from helexa.http.service_manager import notify
from helexa.neuron.config import NeuronConfig
from helexa.neuron.engine_client.warm_standby import WarmStandby
from helexa.neuron.hardware.discovery import broken_driver, default_device, overlooked
from helexa.neuron.host_group.membership import Membership
from helexa.neuron.lifecycle.activation import Activation
from helexa.neuron.lifecycle.rank_check import max_tensor_parallel
from helexa.neuron.lifecycle.registry import Registry
from helexa.neuron.requests.metrics import Metrics, NodeCollector
from helexa.neuron.requests.response_store import ResponseStore
from helexa.neuron.requests.usage_records import UsageRecords
from helexa.neuron.routes import chat, completions, embeddings, health, management, metrics, models, tokenize, usage
from helexa.neuron.routes.error_response import HANDLERS
from helexa.neuron.routes.responses import responses
from helexa.neuron.server.access import AccessGuard
from helexa.neuron.server.health import HealthMonitor
from helexa.neuron.server.interim import Interim
from helexa.neuron.server.middleware import RequestMiddleware
from helexa.neuron.sources.sources import Sources

log = logging.getLogger(__name__)

MAX_PROMPT_TOKENS = 131072
"""Value of `max_prompt_tokens` in `GET /discovery` if the configuration sets no limit. Each model has its own limit."""

_DRAIN_POLL_SECONDS = 0.05
_ENDING_SECONDS = 3


def create_app(
    config: NeuronConfig, *, standby: WarmStandby | None = None, group: Membership | None = None
) -> Starlette:
    """Return the ASGI application of a node. It serves requests while the default models load in the background.

    The route functions find their shared objects in `app.state`: `registry`, `responses`, `usage`, `activation`,
    `health`, `metrics`, `port`, `group`, `max_prompt_tokens` and `max_tensor_parallel`.

    Args:
        config: the node's configuration.
        standby: starts the engine processes. It may already have started the process of the first default model.
        group: the hosts that compute models together with this node; None if the node has no host group.
    """
    harness = config.harness.torch
    device = harness.device
    if device == "auto":
        device = default_device()
        if device == "cpu" and (reason := overlooked()) is not None:
            log.warning("%s", reason)
    # Later loads need the cached result of `discover` without waiting, so this call must come first.
    if device.startswith("cuda") and (reason := broken_driver()) is not None:
        log.error("%s (no model can be loaded on %s)", reason, device)
    engines = standby or WarmStandby()
    registry = Registry(config, Sources(config), device=device, group=group, spawn=engines.take)
    activation = Activation(registry, config.default_models)
    store = ResponseStore(config.responses)
    monitor = HealthMonitor(registry, activation, responses=store.prefix if store.enabled else None)

    async def load_default_models() -> None:
        await activation.run()
        await engines.close()  # if no default model needed a process

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(load_default_models()), asyncio.create_task(monitor.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await registry.close()
            await engines.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    routes = [
        *health.routes,
        *metrics.routes,
        *management.routes,
        *chat.routes,
        *completions.routes,
        *responses.routes,
        *embeddings.routes,
        *tokenize.routes,
        *usage.routes,
        *models.routes,
    ]
    node_metrics = Metrics({route.endpoint: route.path for route in routes})
    node_metrics.watch(NodeCollector(monitor.report, registry.infos, registry.events))
    app = _App(config, node_metrics, routes=routes, exception_handlers=dict(HANDLERS), lifespan=lifespan)
    app.state.registry = registry
    app.state.responses = store
    app.state.usage = UsageRecords()
    app.state.activation = activation
    app.state.health = monitor
    app.state.metrics = node_metrics
    app.state.port = config.port
    app.state.group = group
    bound = harness.context_limit.max_prompt_tokens
    app.state.max_prompt_tokens = bound or harness.context_length or MAX_PROMPT_TOKENS
    app.state.max_tensor_parallel = partial(max_tensor_parallel, device, harness.tensor_parallel)
    return app


class _App(Starlette):
    """Starlette application that logs, counts and checks every request, even if no route matches the request."""

    def __init__(self, config: NeuronConfig, node_metrics: Metrics, **options: Any) -> None:
        super().__init__(**options)
        self._config = config
        self._metrics = node_metrics

    def build_middleware_stack(self) -> ASGIApp:
        """Return the application with its middleware: first the request log, then access checks, then 102 responses."""
        return RequestMiddleware(
            AccessGuard(Interim(super().build_middleware_stack()), self._config), self._metrics, self.state.usage
        )


class NodeConnection(Connection):
    """An HTTP connection with higher limits on the headers than the gateway has.

    The gateway adds headers to the requests that it forwards, and the node must accept them.
    """

    max_head_bytes = Connection.max_head_bytes + (8 << 10)
    max_headers = Connection.max_headers + 28


class NodeServer(Listener):
    """Serves the application on a listening socket until SIGTERM or SIGINT.

    After the signal, the server rejects new requests and waits `drain_secs` seconds for running requests. Then it stops
    the engines and exits with code 0. A second signal exits at once with code 1. Engines never outlive this process.
    """

    def __init__(self, app: Starlette, drain_secs: float) -> None:
        descriptors = raise_descriptor_limit()
        super().__init__(
            app,
            connection=NodeConnection,
            limits=ConnectionLimits.within(descriptors, other_descriptors=descriptors // 2),  # for engines and files
            grace_secs=_ENDING_SECONDS,
        )
        self._registry: Registry = app.state.registry
        self._drain_secs = drain_secs
        self._leaving: asyncio.Task[None] | None = None

    async def serve(self, bound: socket.socket) -> None:
        """Serve on the socket `bound` until SIGTERM or SIGINT, then exit the process."""
        on_stop_signals(self._stop)
        collect_seldom()
        notify("READY=1")  # the socket already accepts connections
        await super().serve(bound)
        tracing.shut_down()
        logging.shutdown()
        # A normal exit would wait for threads, and a thread may hang in a download.
        os._exit(0)

    async def end(self) -> None:
        """Stop all engines. Requests that are still running then end with an error response."""
        ending = asyncio.create_task(self._registry.close())
        await super().end()
        ending.cancel()

    def _stop(self) -> None:
        if self._leaving is not None:
            logging.shutdown()
            os._exit(1)
        tell(log, logging.INFO, "draining", drain_secs=self._drain_secs)
        notify("STOPPING=1")
        self._registry.drain()
        self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        """Wait up to `drain_secs` seconds for running requests to end, then stop the server."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_secs):
                while any(model.load().in_flight for model in self._registry.models()):  # noqa: ASYNC110
                    await asyncio.sleep(_DRAIN_POLL_SECONDS)
        self.should_exit = True
