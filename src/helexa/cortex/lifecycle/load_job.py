"""Loads one model on one node: evicts other models, calls the node's load API, and watches the load's progress."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass

from helexa.core.fleet import ModelInfo
from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.fleet_view import Node
from helexa.cortex.fleet.node_client import NodeClient, NodeError
from helexa.cortex.lifecycle.drain import Drains
from helexa.cortex.lifecycle.memory_estimator import (
    HOST,
    Megabytes,
    MemoryChange,
    MemoryEstimator,
    additional_mb,
    reading,
)
from helexa.cortex.lifecycle.placement import ColdPlacement
from helexa.cortex.routing.router import WarmRoute

log = logging.getLogger(__name__)

WATCH_SECS = 0.1
_LEAST_FRACTION = 0.02  # below this fraction, the remaining time is not extrapolated


@dataclass(frozen=True)
class Progress:
    """Progress of a model's load. An attribute is None if its value is unknown.

    Attributes:
        fraction: completed fraction of the current stage, 0 to 1.
        stage: short description of the current stage.
        eta_secs: estimated seconds until the load ends. If `fraction` is known, the estimate may instead be the seconds
            until the current stage ends.
    """

    fraction: float | None = None
    stage: str | None = None
    eta_secs: float | None = None


@dataclass(frozen=True)
class LoadDependencies:
    """The gateway components that every load job uses."""

    fleet: Fleet
    client: NodeClient
    memory: MemoryEstimator
    drains: Drains
    clock: Callable[[], float]


class LoadJob:
    """One load of a model, from the placement decision to the end of the load.

    The constructor reserves memory on the node, and stops new requests for the models to evict. The method `release`
    ends the reservation and allows requests again.

    Attributes:
        cold: the placement decision: model, node and models to evict.
        secs: duration of the load on the node in seconds. None before the load has ended, and for a load that another
            client started.
    """

    def __init__(
        self,
        cold: ColdPlacement,
        size_mb: int,
        victims: dict[str, Megabytes],
        dependencies: LoadDependencies,
        usual_secs: float | None,
    ) -> None:
        """Reserve memory on the node, and stop new requests for the models to evict.

        Args:
            cold: the placement decision.
            size_mb: memory that the model will use, in MB.
            victims: by model id, the memory use of the models to evict in MB by device index. May contain other models.
            dependencies: the gateway components that every load job uses.
            usual_secs: usual duration of this load in seconds; None if unknown.
        """
        self.cold = cold
        self.secs: float | None = None
        self._dependencies = dependencies
        self._usual_secs = usual_secs
        self._loading_since: float | None = None
        self._stage_since = 0.0
        self._stage = "unloading other models" if cold.evict else "loading"
        self._resources = ExitStack()
        node = dependencies.fleet.node(cold.node)
        self._resources.enter_context(dependencies.fleet.load(cold.node, cold.model))
        self._victim_drains = [
            self._resources.enter_context(dependencies.drains.draining((cold.node, model), victims[model]))
            for model in cold.evict
        ]
        devices = cold.spec.devices or [HOST]
        self._required_mb = {device: size_mb // len(devices) for device in devices}
        self._change = MemoryChange({})
        self._reserve()
        # If the load is already running, the node's readings include its memory.
        if not cold.joined or reading(node) is None:
            dependencies.memory.begin(node, self._change)
            self._resources.callback(self._cancel_reservation)

    @property
    def pair(self) -> Pair:
        """The (node name, model id) pair of the load."""
        return self.cold.node, self.cold.model

    async def run(self, is_needed: Callable[[], bool], stall_timeout_secs: float) -> WarmRoute:
        """Evict models if necessary, load the model, and return the node and URL that serve the model.

        Args:
            is_needed: returns whether any request still waits for the model. It is called only during the evictions.
            stall_timeout_secs: seconds without progress after which the load fails.

        Raises:
            NodeError: the node rejected the load, the load failed, or it made no progress for `stall_timeout_secs`.
            StillNeededError: a model could not be evicted, so the load was not started.
        """
        for drain in self._victim_drains:
            await drain.idle(is_needed)
        for drain in self._victim_drains:
            await drain.unload()
            self._reserve()
        name, model = self.pair
        node = self._node()
        self._loading_since, self._stage = self._dependencies.clock(), "loading"
        bearer = self._dependencies.fleet.bearer(node.name)
        await self._watch(self._dependencies.client.load(node.endpoint, self.cold.spec, bearer), stall_timeout_secs)
        if not self.cold.joined:
            self.secs = self._dependencies.clock() - self._loading_since
        url = await self._dependencies.client.url(node, model, bearer)
        spec = self.cold.spec
        info = ModelInfo(
            id=model, harness=spec.harness, devices=spec.devices or [], tensor_parallel=spec.tensor_parallel
        )
        self._dependencies.fleet.loaded(name, info, url)
        self._change.ended_at = self._dependencies.clock()
        return WarmRoute(model, name, url, f"node={name}; why=loaded"[:100])

    def release(self) -> None:
        """End the memory reservation, and allow requests for models that were not evicted. May be called twice."""
        self._resources.close()

    def progress(self) -> Progress:
        """Return the current progress of the load."""
        if self._loading_since is None:
            return Progress(None, self._stage, self._usual_secs)
        fraction, stage = self._reported()
        elapsed = self._dependencies.clock() - self._loading_since
        if fraction is not None and fraction >= _LEAST_FRACTION:
            eta = (self._dependencies.clock() - self._stage_since) * (1 - fraction) / fraction
        else:
            eta = None if self._usual_secs is None else max(1.0, self._usual_secs - elapsed)
        return Progress(fraction, stage or self._stage, eta)

    def _reported(self) -> tuple[float | None, str | None]:
        try:
            return reported_progress(self._node(), self.cold.model)
        except NodeError:
            return None, None

    def _node(self) -> Node:
        try:
            return self._dependencies.fleet.node(self.cold.node)
        except KeyError:
            raise NodeError("the node was removed from the configuration") from None

    async def _watch(self, load: Coroutine[None, None, None], stall_timeout_secs: float) -> None:
        """Wait until the load call returns.

        Raises:
            NodeError: the load failed, the node went down, or the load made no progress for `stall_timeout_secs`.
        """
        task = asyncio.create_task(load, name=f"load {self.pair}: the node")
        last_progress: tuple[float | None, str | None] = (None, None)
        progress_at = self._stage_since = self._dependencies.clock()
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=WATCH_SECS)
                node = self._node()
                progress = reported_progress(node, self.cold.model)
                if progress[1] != last_progress[1]:
                    self._stage_since = self._dependencies.clock()
                if progress != last_progress:
                    last_progress, progress_at = progress, self._dependencies.clock()
                if not task.done() and (
                    not node.healthy or self._dependencies.clock() - progress_at > stall_timeout_secs
                ):
                    self._change.ended_at = (
                        self._dependencies.clock()
                    )  # the load may continue on the node, so its memory counts as used
                    cause = f"no progress within {stall_timeout_secs:g} s" if node.healthy else "the node went down"
                    raise NodeError(cause)
            task.result()
        finally:
            task.cancel()
            await asyncio.wait((task,))

    def _reserve(self) -> None:
        """Update the reserved memory: the load's memory minus the memory of the models that are still to be evicted."""
        self._change.megabytes = additional_mb(
            self._required_mb, [drain.megabytes for drain in self._victim_drains if not drain.is_unloaded()]
        )

    def _cancel_reservation(self) -> None:
        if self._change.ended_at is None:
            self._dependencies.memory.cancel(self.cold.node, self._change)


def reported_progress(node: Node, model: str) -> tuple[float | None, str | None]:
    """Return the progress that the node reports for the load of `model`: a fraction and the name of the load's stage.

    The fraction (0 to 1) is the completed part of the stage. A value that the node does not report is None.
    """
    info = node.models.get(model)
    if info is not None and info.status == "loading":
        return _fraction(info.progress), info.stage
    activation = node.health.activation if node.health else None
    if activation is not None and activation.in_progress == model:
        return _fraction(activation.progress), activation.stage
    return None, None


def _fraction(value: float | None) -> float | None:
    return None if value is None else min(1.0, max(0.0, value))
