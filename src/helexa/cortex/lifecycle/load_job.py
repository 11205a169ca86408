"""One load of a model on a node: evictions of other models, load and progress."""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from helexa.core.node_reports import ModelInfo
from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.fleet_view import Node
from helexa.cortex.fleet.node_client import NodeClient, or_none
from helexa.cortex.fleet.node_errors import NodeError
from helexa.cortex.lifecycle.memory import HOST, Megabytes, MemoryChange, MemoryEstimator, additional_mb, reading
from helexa.cortex.lifecycle.model_drain import Drains
from helexa.cortex.lifecycle.placement import ColdPlacement
from helexa.cortex.routing import WarmRoute

WATCH_SECS = 0.1
_LEAST_FRACTION = 0.02  # below this fraction, the remaining time is not extrapolated


@dataclass(frozen=True)
class Progress:
    """Progress of a load job. An attribute is None if its value is unknown."""

    fraction: float | None = None  # completed fraction of the current stage, 0 to 1
    stage: str | None = None  # short description of the current stage
    # Estimated seconds until the load ends. If `fraction` is known, the estimate may instead be the seconds until the
    # current stage ends.
    eta_secs: float | None = None

    def json_dict(self) -> dict[str, Any]:
        """Return the progress as a JSON object, without unknown values."""
        values = {"fraction": self.fraction, "stage": self.stage, "eta_secs": self.eta_secs}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class LoadDependencies:
    """The gateway components that every load job uses."""

    fleet: Fleet
    client: NodeClient
    memory: MemoryEstimator
    drains: Drains
    clock: Callable[[], float]


class LoadJob:
    """One load of a model, from the placement decision to the end of the load."""

    def __init__(
        self,
        cold: ColdPlacement,
        size_mb: int,
        victims: dict[str, Megabytes],
        dependencies: LoadDependencies,
        usual_secs: float | None,
        unlisted: Collection[str] = (),
    ) -> None:
        """Reserve memory on the node, and stop new requests for the models to evict.

        The caller must call `release` when the job has ended.

        Args:
            size_mb: memory that the model will use, in MB.
            victims: memory use in MB, by model id and device index, of at least the models to evict.
            usual_secs: usual duration of this load in seconds; None if unknown.
            unlisted: models to evict that this gateway could not load again. These models are put to sleep instead of
                being unloaded, if the node can do this, so that a request can wake them.
        """
        self.cold = cold  # the placement decision: model, node and models to evict
        # Duration of the load on the node in seconds. None before the load has ended, and for a load that another
        # client started.
        self.secs: float | None = None
        self._dependencies = dependencies
        self._usual_secs = usual_secs
        self._unlisted = unlisted
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
        # If the load is already running, the free memory that the node reports already accounts for the load. A memory
        # reservation would count the load twice.
        if not cold.joined or reading(node) is None:
            dependencies.memory.begin(node, self._change)
            self._resources.callback(self._cancel_reservation)

    @property
    def devices(self) -> list[int]:
        """Indices of the devices on which the model is loaded; `HOST` if none is chosen."""
        return list(self._required_mb)

    @property
    def pair(self) -> Pair:
        """The (node name, model id) pair of the load."""
        return self.cold.node, self.cold.model

    async def run(self, is_needed: Callable[[], bool], stall_timeout_secs: float) -> WarmRoute:
        """Evict and load; return the node and URL that serve the model.

        Args:
            is_needed: returns whether any request still waits for the model. It is called only during the evictions.
            stall_timeout_secs: seconds without progress after which the load fails.

        Raises:
            NodeError: an eviction or the load failed, or the load made no progress.
            StillNeededError: a model to evict still has requests, so the load was not started.
        """
        # No model is unloaded before all models to evict are idle. If the load is abandoned while it waits for a model,
        # no other model was unloaded in vain.
        for drain in self._victim_drains:
            await drain.idle(is_needed)
        for drain in self._victim_drains:
            await drain.unload(only_sleep=drain.pair[1] in self._unlisted)
            self._reserve()
        name, model = self.pair
        node = self._node()
        self._loading_since, self._stage = self._dependencies.clock(), "loading"
        bearer = self._dependencies.fleet.bearer(node.name)
        await self._watch(self._dependencies.client.load(node.endpoint, self.cold.spec, bearer), stall_timeout_secs)
        # A load that this job only joined had begun earlier, so its duration is not known.
        if not self.cold.joined:
            self.secs = self._dependencies.clock() - self._loading_since
        url = await self._dependencies.client.url(node, model, bearer)
        info = await self._loaded_info(node, bearer)
        self._dependencies.fleet.loaded(name, info, url)
        size_mb = info.vram_used_mb if info.granted_mb is None else info.granted_mb
        if size_mb is not None:  # the estimate may be too small, for example because of a larger KV cache
            self._change.megabytes = {device: size_mb // len(self._required_mb) for device in self._required_mb}
        self._change.ended_at = self._dependencies.clock()
        return WarmRoute(model, name, url, f"node={name}; why=loaded"[:100])

    async def _loaded_info(self, node: Node, bearer: str | None) -> ModelInfo:
        """Return the node's report about the model, else a report made from the request."""
        spec, model = self.cold.spec, self.cold.model
        reported = (await or_none(self._dependencies.client.models, node.endpoint, bearer) or {}).get(model)
        if reported is not None and reported.status == "loaded":
            return reported
        return ModelInfo(
            id=model, harness=spec.harness, devices=spec.devices or [], tensor_parallel=spec.tensor_parallel
        )

    def release(self) -> None:
        """Allow requests for models that were not evicted, and cancel the reservation.

        The memory stays reserved until a reading includes it if the load succeeded, or if it may continue on the node.
        May be called twice.
        """
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
            raise NodeError(
                f"node '{self.cold.node}' was removed from the configuration; add the node again, or use another"
            ) from None

    async def _watch(self, load: Coroutine[None, None, None], stall_timeout_secs: float) -> None:
        """Run the load call, and watch the progress that the node reports.

        Raises:
            NodeError: the node went down, the node reported no progress for `stall_timeout_secs`, or the call failed.
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
                    # The load may continue on the node, so its memory counts as used until the node's next report.
                    self._change.ended_at = self._dependencies.clock()
                    cause = (
                        f"the load made no progress within {stall_timeout_secs:g} s; see the node's log, or raise "
                        "gateway.load_timeout_secs"
                        if node.healthy
                        else "the node went down during the load; see the node's log"
                    )
                    raise NodeError(cause)
            task.result()
        finally:
            task.cancel()
            await asyncio.wait((task,))

    def _reserve(self) -> None:
        """Reserve the load's memory, minus the memory that pending evictions will free."""
        self._change.megabytes = additional_mb(
            self._required_mb, [drain.megabytes for drain in self._victim_drains if not drain.is_unloaded()]
        )

    def _cancel_reservation(self) -> None:
        if self._change.ended_at is None:
            self._dependencies.memory.cancel(self.cold.node, self._change)


def reported_progress(node: Node, model: str) -> tuple[float | None, str | None]:
    """Return the fraction and the stage that the node reports for the load of `model`.

    The fraction (0 to 1) is the completed part of the stage. A value that the node does not report is None.
    """
    info = node.models.get(model)
    if info is not None and info.status in ("loading", "sleeping"):
        return _fraction(info.progress), info.stage
    activation = node.health.activation if node.health else None
    if activation is not None and activation.in_progress == model:
        return _fraction(activation.progress), activation.stage
    return None, None


def _fraction(value: float | None) -> float | None:
    return None if value is None else min(1.0, max(0.0, value))
