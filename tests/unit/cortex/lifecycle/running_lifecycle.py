"""A lifecycle manager in front of fake nodes, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from cortex.fake_node import FakeNode
from cortex.running_gateway import eventually, open_client
from helexa.core.catalog import Catalog
from helexa.core.errors import ApiError
from helexa.cortex.config import CortexConfig
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.poller import Poller
from helexa.cortex.lifecycle.lifecycle import Lifecycle
from helexa.cortex.lifecycle.load_queue import WaitingRequest
from helexa.cortex.routing import WarmRoute

SIZES = {"A": 6000, "B": 7000, "C": 3000, "Pinned": 6000}
MODELS: list[dict[str, Any]] = [{"id": model, "vram_mb": size} for model, size in SIZES.items()]


@dataclass
class Stage:
    """A running lifecycle manager, and the loads and evictions that it reported as (model, node)."""

    fleet: Fleet
    lifecycle: Lifecycle
    loaded: list[tuple[str, str]]
    evicted: list[tuple[str, str]]

    def ask(self, model: str) -> asyncio.Task[WarmRoute]:
        return asyncio.create_task(self.lifecycle.serve(model, WaitingRequest()))

    def holds(self, node: str) -> set[str]:
        return set(self.fleet.node(node).models)

    async def refused(self, model: str) -> ApiError:
        with pytest.raises(ApiError) as caught:
            async with asyncio.timeout(60):
                await self.ask(model)
        return caught.value

    def settled(self) -> bool:
        view = self.fleet.view()
        return not view.loading and not view.draining and self.lifecycle.progress("A") is None


@asynccontextmanager
async def stage(
    *nodes: FakeNode,
    models: list[dict[str, Any]] = MODELS,
    gateway: Any = None,
    poll_secs: float = 0.05,
    **eviction: Any,
) -> AsyncIterator[Stage]:
    config = CortexConfig.model_validate(
        {
            "neurons": [{"name": node.name, "endpoint": node.url} for node in nodes],
            "eviction": {"min_residency_secs": 0, "swap_wait_secs": 0} | eviction,
            "gateway": gateway or {},
        }
    )
    loaded: list[tuple[str, str]] = []
    evicted: list[tuple[str, str]] = []
    async with open_client() as client:
        fleet = Fleet(config.neurons)
        lifecycle = Lifecycle(
            fleet,
            client,
            config,
            Catalog.model_validate({"models": models}),
            loaded=lambda model, node: loaded.append((model, node)),
            evicted=lambda model, node: evicted.append((model, node)),
        )
        running = [asyncio.create_task(Poller(fleet, client, poll_secs).run()), asyncio.create_task(lifecycle.run())]
        await eventually(lambda: all(node.healthy and node.read_at for node in fleet.view().nodes))
        try:
            yield Stage(fleet, lifecycle, loaded, evicted)
        finally:
            await lifecycle.close()
            for task in running:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
