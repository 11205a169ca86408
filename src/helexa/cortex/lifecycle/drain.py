"""Drains: before a model is unloaded from a node, it gets no new requests and finishes its running requests."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.node_client import NodeClient, NodeError
from helexa.cortex.lifecycle.memory_estimator import Megabytes, MemoryChange, MemoryEstimator

log = logging.getLogger(__name__)

DRAIN_SECS = 300.0
LOOK_SECS = 0.05


class StillNeededError(Exception):
    """Raised if a model is not unloaded because its drain was abandoned.

    A drain is abandoned if requests for the model still run after `DRAIN_SECS`, or if the model's memory is not needed
    any more.
    """


class Drain:
    """The drain of one model on one node: the model gets no new requests, and its running requests can finish.

    The drain ends when the model is unloaded or when the drain is abandoned.

    Attributes:
        pair: the node's name and the model's id.
        megabytes: memory that the model uses in MB, by device index.
    """

    def __init__(self, drains: "Drains", pair: Pair, megabytes: Megabytes, change: MemoryChange) -> None:
        self._drains = drains
        self._change = change
        self.pair = pair
        self.megabytes = megabytes

    async def idle(self, is_needed: Callable[[], bool]) -> None:
        """Wait until this gateway and the node have no running or queued requests for the model.

        Other clients may also send requests to the node, so the node is queried for its requests.

        Args:
            is_needed: returns False once the unload is not needed any more.

        Raises:
            StillNeededError: requests still run, and `DRAIN_SECS` have passed or `is_needed()` returned False.
            NodeError: the node does not report its running requests.
        """
        deadline = asyncio.get_running_loop().time() + DRAIN_SECS
        while self._drains.has_own_requests(self.pair) or await self._drains.has_node_requests(self.pair):
            if asyncio.get_running_loop().time() > deadline or not is_needed():
                raise StillNeededError
            await asyncio.sleep(LOOK_SECS)

    async def unload(self) -> None:
        """Unload the model, and count the model's memory as expected free memory of the node.

        Raises:
            NodeError: the node rejected the unload or did not answer.
        """
        await self._drains.unload(self.pair)
        self._change.megabytes = {index: -size for index, size in self.megabytes.items()}
        self._change.ended_at = self._drains.clock()

    def is_unloaded(self) -> bool:
        """Return whether `unload` has succeeded."""
        return self._change.ended_at is not None


class Drains:
    """Starts drains, and unloads models from nodes.

    Args:
        fleet: state of the nodes.
        client: client for the nodes' management API.
        memory: tracks the expected free memory of the nodes.
        clock: returns monotonic seconds.
        evicted: called with the model id and the node name after every unload.
    """

    def __init__(
        self,
        fleet: Fleet,
        client: NodeClient,
        memory: MemoryEstimator,
        clock: Callable[[], float],
        evicted: Callable[[str, str], None],
    ) -> None:
        self.fleet = fleet
        self.clock = clock
        self.warn_after = 0
        self._client = client
        self._memory = memory
        self._evicted = evicted
        self._cycles: dict[str, int] = {}

    @contextmanager
    def draining(self, pair: Pair, megabytes: Megabytes) -> Iterator[Drain]:
        """Return a context manager during which the gateway sends no new requests for the model to the node.

        The context manager returns a `Drain`, with which the caller unloads the model.

        Args:
            pair: the node's name and the model's id.
            megabytes: memory that the model uses in MB, by device index.
        """
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
        """Return whether the node reports running or queued requests for the model.

        This method sends a request to the node, because the last poll may be out of date.
        """
        health = await self._client.health(self._endpoint(pair[0]), self.fleet.bearer(pair[0]))
        return any(load.id == pair[1] and load.in_flight + load.queue_depth > 0 for load in health.models)

    async def unload(self, pair: Pair) -> None:
        """Unload a model from a node, update the state of the fleet, and call the `evicted` callback.

        Raises:
            NodeError: the node rejected the unload or did not answer.
        """
        name, model = pair
        await self._client.unload(self._endpoint(name), model, self.fleet.bearer(name))
        self.fleet.unloaded(name, model)
        cycles = self._cycles[name] = self._cycles.get(name, 0) + 1
        log.info("unloaded %s on %s", model, name)
        if self.warn_after and cycles % self.warn_after == 0:
            log.warning("node %s has unloaded %d models: restart it if its free memory shrinks", name, cycles)
        self._evicted(model, name)

    def _endpoint(self, name: str) -> str:
        node = next((node for node in self.fleet.view().nodes if node.name == name), None)
        if node is None:
            raise NodeError("the node was removed from the configuration")
        return node.endpoint
