"""The node's HTTP application: its routes, its state, what lives as long as it does, and the server it runs in."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.types import ASGIApp

from helexa.http.connections.connection import Connection
from helexa.http.connections.connection_limits import ConnectionLimits
from helexa.http.descriptor_limit import raise_descriptor_limit
from helexa.http.listener import Listener, collect_seldom
from helexa.http.loop import run
from helexa.neuron.config import NeuronConfig
from helexa.neuron.engine_client.child import Child
from helexa.neuron.hardware.discovery import default_device, discover, overlooked
from helexa.neuron.lifecycle.activation import Activation
from helexa.neuron.lifecycle.registry import Registry
from helexa.neuron.requests.metrics import Metrics, NodeCollector
from helexa.neuron.requests.response_store import ResponseStore
from helexa.neuron.requests.usage_records import UsageRecords
from helexa.neuron.routes import chat, completions, embeddings, health, management, metrics, models, tokenize, usage
from helexa.neuron.routes.refusal import HANDLERS
from helexa.neuron.routes.responses import responses
from helexa.neuron.server.access import AccessGuard
from helexa.neuron.server.health import HealthMonitor
from helexa.neuron.server.interim import Interim
from helexa.neuron.server.middleware import Front
from helexa.neuron.sources.sources import Sources

log = logging.getLogger(__name__)

MAX_PROMPT_TOKENS = 131072
"""What `/discovery` gives as the node's longest prompt when the configuration bounds none; each model has its own."""

_DRAIN_SECONDS = 5
_DRAIN_POLL_SECONDS = 0.05
_ENDING_SECONDS = 3


def create_app(config: NeuronConfig, *, engine_command: Sequence[str] | None = None) -> Starlette:
    """The application of one node. It serves at once; the default models follow in the background.

    `app.state` holds `registry`, `responses`, `usage`, `activation`, `health`, `metrics`, `port` and
    `max_prompt_tokens`.

    Args:
        engine_command: the command line of an engine process, instead of the usual one.
    """
    harness = config.harness.torch
    device = harness.device
    if device == "auto":
        device = default_device()
        if device == "cpu" and (reason := overlooked()) is not None:
            log.warning("%s", reason)
    if device.startswith("cuda"):
        discover()  # loads ask for it, and may not wait for it then
    registry = Registry(config, Sources(config), device=device, spawn=partial(Child.spawn, engine_command))
    activation = Activation(registry, config.default_models)
    kept = ResponseStore(config.responses)
    monitor = HealthMonitor(registry, activation, responses=kept.prefix if kept.enabled else None)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(activation.run()), asyncio.create_task(monitor.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await registry.close()
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
    counted = Metrics({route.endpoint: route.path for route in routes})
    counted.watch(NodeCollector(monitor.report, registry.infos, registry.events))
    app = _App(config, counted, routes=routes, exception_handlers=dict(HANDLERS), lifespan=lifespan)
    app.state.registry = registry
    app.state.responses = kept
    app.state.usage = UsageRecords()
    app.state.activation = activation
    app.state.health = monitor
    app.state.metrics = counted
    app.state.port = config.port
    bound = harness.context_limit.max_prompt_tokens
    app.state.max_prompt_tokens = bound or harness.context_length or MAX_PROMPT_TOKENS
    return app


class _App(Starlette):
    """An application that logs, counts and checks every request, also those that no route takes."""

    def __init__(self, config: NeuronConfig, counted: Metrics, **options: Any) -> None:
        super().__init__(**options)
        self._config = config
        self._counted = counted

    def build_middleware_stack(self) -> ASGIApp:
        """Return the routes inside the access checks, inside the request log."""
        return Front(
            AccessGuard(Interim(super().build_middleware_stack()), self._config), self._counted, self.state.usage
        )


class NodeConnection(Connection):
    """A connection that takes what a gateway took from its client, and what it added."""

    max_head_bytes = Connection.max_head_bytes + (8 << 10)
    max_headers = Connection.max_headers + 28


class NodeServer(Listener):
    """Runs the application on a socket that already listens.

    SIGTERM or SIGINT refuses further requests in words, gives those that run a few seconds, ends the engines and exits
    with 0. A second one exits at once; engines end with this process, however it does.
    """

    def __init__(self, app: Starlette) -> None:
        descriptors = raise_descriptor_limit()
        super().__init__(
            app,
            connection=NodeConnection,
            limits=ConnectionLimits.within(descriptors, others=descriptors // 2),  # the rest is for engines and files
            grace_secs=_ENDING_SECONDS,
        )
        self._registry: Registry = app.state.registry
        self._leaving: asyncio.Task[None] | None = None

    def run(self, bound: socket.socket) -> None:
        """Serve in an event loop of its own until a signal, then end the process."""
        run(self.serve(bound))

    async def serve(self, bound: socket.socket) -> None:
        """Serve until a signal, then end the process."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError):  # not every system's loop can
                loop.add_signal_handler(number, self._stop)
        collect_seldom()
        await super().serve(bound)
        logging.shutdown()
        # Past this point only threads could be waited for, and one of them may hang in somebody else's download.
        os._exit(0)

    async def end(self) -> None:
        """End what still runs with an error that its client can read."""
        ending = asyncio.create_task(self._registry.close())
        await super().end()
        ending.cancel()

    def _stop(self) -> None:
        if self._leaving is not None:
            logging.shutdown()
            os._exit(1)
        self._registry.drain()
        self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        """Stop when nothing runs any more, or when that takes too long; until then others are told to go elsewhere."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                while any(model.load().in_flight for model in self._registry.models()):  # noqa: ASYNC110
                    await asyncio.sleep(_DRAIN_POLL_SECONDS)
        self.should_exit = True
