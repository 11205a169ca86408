"""Drains a model before its unload: stops new requests, waits for running ones."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from helexa.core.logs import quoted
from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.node_client import NodeClient
from helexa.cortex.fleet.node_errors import NodeError
from helexa.cortex.lifecycle.memory import Megabytes, MemoryChange, MemoryEstimator

log = logging.getLogger(__name__)

DRAIN_SECS = 300.0
LOOK_SECS = 0.05


class StillNeededError(Exception):
    """A model was not unloaded, because requests for the model still run."""


class Drain:
    """The drain of one model on one node: it ends when the model is unloaded or kept.

    During a drain, the gateway sends the model no new requests, and waits until the running requests end.
    """

    def __init__(self, drains: "Drains", pair: Pair, megabytes: Megabytes, change: MemoryChange) -> None:
        self._drains = drains
        self._change = change
        self.pair = pair
        self.megabytes = megabytes  # memory that the model uses in MB, by device index

    async def idle(self, is_needed: Callable[[], bool]) -> None:
        """Wait until the gateway and the node have no requests for the model.

        Raises:
            StillNeededError: requests still run, and `DRAIN_SECS` have passed or `is_needed()` returned False.
            NodeError: the node does not report its running requests.
        """
        deadline = asyncio.get_running_loop().time() + DRAIN_SECS
        # Clients may also send requests to the node without this gateway, so the node must be asked for its requests.
        while self._drains.has_own_requests(self.pair) or await self._drains.has_node_requests(self.pair):
            if asyncio.get_running_loop().time() > deadline or not is_needed():
                raise StillNeededError
            await asyncio.sleep(LOOK_SECS)

    async def unload(self, *, only_sleep: bool = False) -> None:
        """Unload the model, and count its memory as expected free memory.

        Args:
            only_sleep: put the model to sleep instead, if its node can do this.

        Raises:
            NodeError: the node rejected the unload or did not answer.
        """
        if not (only_sleep and await self._drains.put_to_sleep(self.pair)):
            await self._drains.unload(self.pair)
        self._change.megabytes = {index: -size for index, size in self.megabytes.items()}
        self._change.ended_at = self._drains.clock()

    def is_unloaded(self) -> bool:
        """Return whether `unload` has succeeded."""
        return self._change.ended_at is not None


class Drains:
    """Starts drains of models (see `Drain`), and lets nodes unload the models."""

    def __init__(
        self,
        fleet: Fleet,
        client: NodeClient,
        memory: MemoryEstimator,
        clock: Callable[[], float],
        evicted: Callable[[str, str], None],
    ) -> None:
        self.fleet = fleet  # state of the nodes
        self.clock = clock  # returns monotonic seconds
        self.warn_after = 0  # number of unloads on a node after which a warning is logged; 0 disables it
        self._client = client  # client for the nodes' management API
        self._memory = memory  # tracks the expected free memory of the nodes
        self._evicted = evicted  # called with the model id and the node name after every unload
        self._cycles: dict[str, int] = {}

    @contextmanager
    def draining(self, pair: Pair, megabytes: Megabytes) -> Iterator[Drain]:
        """Return a context manager during which the model of `pair` drains: see `Drain`."""
        node = self.fleet.node(pair[0])
        memory_change = MemoryChange({})
        drain = Drain(self, pair, megabytes, memory_change)
        self._memory.begin(node, memory_change)
        try:
            with self.fleet.drain(*pair):
                yield drain
        finally:
            if not drain.is_unloaded():
                self._memory.cancel(node.name, memory_change)

    def has_own_requests(self, pair: Pair) -> bool:
        """Return whether this gateway has running requests for the (node, model) pair."""
        return self.fleet.view().in_flight.get(pair, 0) > 0

    async def has_node_requests(self, pair: Pair) -> bool:
        """Ask the node whether it has running or queued requests for the model."""
        # Ask the node now, because the last poll may be out of date.
        health = await self._client.health(self._endpoint(pair[0]), self.fleet.bearer(pair[0]))
        return any(load.id == pair[1] and load.in_flight + load.queue_depth > 0 for load in health.models)

    async def put_to_sleep(self, pair: Pair) -> bool:
        """Put a model to sleep; return False if its node cannot do this.

        Raises:
            NodeError: the node rejected the request or did not answer.
        """
        name, model = pair
        if not await self._client.sleep(self._endpoint(name), model, self.fleet.bearer(name)):
            return False
        self.fleet.fell_asleep(name, model)
        log.info("model put to sleep model=%s node=%s", quoted(model), name)
        return True

    async def unload(self, pair: Pair) -> None:
        """Unload a model, update the fleet, and call the `evicted` callback.

        Raises:
            NodeError: the node rejected the unload or did not answer.
        """
        name, model = pair
        await self._client.unload(self._endpoint(name), model, self.fleet.bearer(name))
        self.fleet.unloaded(name, model)
        cycles = self._cycles[name] = self._cycles.get(name, 0) + 1
        log.info("model unloaded model=%s node=%s", quoted(model), name)
        if self.warn_after and cycles % self.warn_after == 0:
            log.warning(
                "node has unloaded many models node=%s unloads=%d; restart the node if its free memory shrinks",
                *(name, cycles),
            )
        self._evicted(model, name)

    def _endpoint(self, name: str) -> str:
        node = next((node for node in self.fleet.view().nodes if node.name == name), None)
        if node is None:
            raise NodeError(f"node '{name}' was removed from the configuration; unload the model on the node itself")
        return node.endpoint
