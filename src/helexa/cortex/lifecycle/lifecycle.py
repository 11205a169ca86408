"""The gateway's model manager: loads the models that requests need, and evicts other models if memory is short."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf

from helexa.core.catalogue import Catalogue
from helexa.core.errors import ApiError, HelexaError, internal_error, shutting_down
from helexa.cortex.config import CortexConfig
from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.node_client import NodeClient, NodeError
from helexa.cortex.lifecycle.drain import Drains, StillNeededError
from helexa.cortex.lifecycle.evictor import expired_models
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot
from helexa.cortex.lifecycle.history import History
from helexa.cortex.lifecycle.load_job import LoadDependencies, LoadJob, Progress, reported_progress
from helexa.cortex.lifecycle.load_timeout import wait_until_loaded
from helexa.cortex.lifecycle.memory_estimator import Megabytes, MemoryEstimator
from helexa.cortex.lifecycle.pending_loads import PendingLoad, WaitingRequest
from helexa.cortex.lifecycle.placement import ColdPlacement, DelayedPlacement
from helexa.cortex.lifecycle.swap_queue import QueuedModel, decide
from helexa.cortex.routing.router import WarmRoute, route

log = logging.getLogger(__name__)

HOLD_SECS = 0.1  # interval between decisions while a load waits for its start
REST_SECS = 5.0  # longest interval between decisions otherwise
_UNLOAD_BACKOFF_SECS = 60.0

ModelCallback = Callable[[str, str], None]
"""Callback that receives a model and a node."""


class Lifecycle:
    """Manages loads, evictions and the queue of requests that wait for loads.

    The caller must run the method `run` as a background task.

    Args:
        loaded: called with the model id and the node name after every successful load.
        evicted: called with the model id and the node name after every unload.
    """

    def __init__(
        self,
        fleet: Fleet,
        client: NodeClient,
        config: CortexConfig,
        catalogue: Catalogue,
        *,
        loaded: ModelCallback,
        evicted: ModelCallback,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._loaded = loaded
        self._clock = clock
        self._began = clock()
        self._history = History()
        self._memory = MemoryEstimator()
        drains = Drains(fleet, client, self._memory, clock, evicted)
        self._dependencies = LoadDependencies(fleet, client, self._memory, drains, clock)
        self._pending: dict[str, PendingLoad] = {}
        self._jobs: dict[str, asyncio.Task[WarmRoute]] = {}
        self._unload_tasks: dict[Pair, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self.configure(config, catalogue)

    def configure(self, config: CortexConfig, catalogue: Catalogue) -> None:
        """Apply a new configuration and catalogue, and forget failed loads so that they are tried again."""
        self._gateway, self._eviction, self._catalogue = config.gateway, config.eviction, catalogue
        self._dependencies.drains.warn_after = config.eviction.defrag_after_cycles
        self._history.failures.clear()  # the new configuration may have fixed their causes

    async def serve(self, model: str, waiting: WaitingRequest) -> WarmRoute:
        """Return the node and URL that serve `model`. If necessary, wait until a node has loaded the model.

        A running load continues if the caller is cancelled. `waiting` is the request, with its priority and time of
        arrival.

        Raises:
            ApiError: 404 for an unknown model; 503 with the reason if the model cannot be served, with Retry-After if a
                later request may succeed.
        """
        target = route(self._fleet.view(), model)
        if target is not None:
            return target
        pending, is_first = self._pending.get(model), False
        if pending is None:
            pending, is_first = PendingLoad(model), True
            self._pending[model] = pending
        try:
            with pending.waiting(waiting):
                if is_first:  # later requests for the same model join the pending load
                    self._decide()
                    self._wake.set()
                remaining = waiting.enqueued + self._gateway.load_wait_secs - self._clock()
                return await wait_until_loaded(pending, remaining, lambda: self._eta(pending))
        finally:
            self._drop_if_unused(pending)

    def progress(self, model: str) -> Progress | None:
        """Return the progress of a model that is loading or waits for free memory, or None for any other model."""
        pending = self._pending.get(model)
        if pending is not None and pending.job is not None:
            return pending.job.progress()
        for node in self._fleet.view().nodes:
            info = node.models.get(model)
            if node.healthy and (model in node.activating() or (info is not None and info.status == "loading")):
                return Progress(*reported_progress(node, model))
        if pending is not None and pending.delayed is not None:
            return Progress(None, f"waiting for memory on {pending.delayed.node}", self._eta(pending))
        return None

    def snapshot(self) -> FleetSnapshot:
        """Return a fleet snapshot: the current state of nodes, models and memory, on which decisions are based."""
        fleet_view = self._fleet.view()
        for node in fleet_view.nodes:
            self._memory.update(node)
        self._history.look(fleet_view)
        return FleetSnapshot(
            fleet_view,
            self._catalogue,
            self._clock(),
            self._began,
            self._eviction,
            self._memory.expected_free(),
            self._memory.reserved(),
            self._history.load_secs,
            self._history.failures,
            self._history.devices,
            self._history.sizes_mb,
            self._history.awaited,
        )

    async def run(self) -> None:
        """Start waiting loads and unload idle models periodically, until cancelled."""
        while True:
            any_waiting = any(pending.job is None for pending in self._pending.values())
            rest_secs = min(REST_SECS, self._eviction.idle_ttl_secs / 4 or inf)
            with suppress(TimeoutError):
                async with asyncio.timeout(HOLD_SECS if any_waiting else rest_secs):
                    await self._wake.wait()
            self._wake.clear()
            try:
                self._decide()
                self._unload_idle()
            except Exception:
                log.exception("deciding on loads failed")

    async def close(self) -> None:
        """Cancel all loads and reject the waiting requests."""
        tasks = [*self._jobs.values(), *self._unload_tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pending in list(self._pending.values()):
            self._resolve(pending, shutting_down())

    def _decide(self) -> None:
        """Start every pending load that can start now.

        If a node has loaded the model in the meantime, forward the waiting requests to this node instead. If the model
        cannot be loaded, reject the waiting requests.
        """
        without_job = [pending for pending in self._pending.values() if pending.job is None]
        for pending in without_job:
            target = route(self._fleet.view(), pending.model)
            if target is not None:
                self._resolve(pending, target)
        queue = [pending for pending in without_job if not pending.outcome.done()]
        for queue_verdict in decide(queue, self.snapshot, self._start):
            pending = self._pending[queue_verdict.queued.model]
            pending.delayed = queue_verdict.decision if isinstance(queue_verdict.decision, DelayedPlacement) else None
            if isinstance(queue_verdict.decision, ApiError):
                self._resolve(pending, queue_verdict.decision)

    def _start(self, queued: QueuedModel, cold: ColdPlacement) -> None:
        pending, snapshot = self._pending[queued.model], self.snapshot()
        node = self._fleet.node(cold.node)
        resident_mb: dict[str, Megabytes] = {
            resident.model: resident.megabytes for resident in snapshot.residents(node)
        }
        usual_secs = snapshot.measured_load_secs(cold.node, cold.model)
        size_mb = snapshot.size_mb(node, cold.model)
        pending.job = job = LoadJob(cold, size_mb, resident_mb, self._dependencies, usual_secs)
        self._history.devices[job.pair] = tuple(cold.spec.devices or ())
        log.info("loading %s on %s%s", cold.model, cold.node, _eviction_note(cold))
        task = asyncio.create_task(
            job.run(pending.has_waiters, self._gateway.load_timeout_secs), name=f"load {job.pair}"
        )
        self._jobs[cold.model] = task
        task.add_done_callback(lambda task: self._on_load_done(pending, job, task))

    def _on_load_done(self, pending: PendingLoad, job: LoadJob, task: asyncio.Task[WarmRoute]) -> None:
        job.release()
        del self._jobs[pending.model]
        pending.job = None
        if task.cancelled():
            return
        error, (node, model) = task.exception(), job.pair
        if error is None:
            self._history.loaded(job.pair, job.secs)
            self._loaded(model, node)
            log.info("loaded %s on %s", model, node)
            self._resolve(pending, task.result())
        elif isinstance(error, NodeError):
            message = f"model '{model}' could not be loaded on node '{node}': {error}"
            log.warning("%s", message)
            self._history.failed(job.pair, message, self._clock(), temporary=error.temporary)
        elif not isinstance(error, StillNeededError):
            log.error("loading %s failed with an internal error", model, exc_info=error)
            self._resolve(pending, internal_error())
        self._drop_if_unused(pending)
        self._wake.set()

    def _resolve(self, pending: PendingLoad, outcome: WarmRoute | HelexaError) -> None:
        """Remove a pending load. Pass `outcome`, a node or an error, to all requests that wait for the model."""
        self._pending.pop(pending.model, None)
        if pending.outcome.done():
            return
        if isinstance(outcome, WarmRoute):
            self._history.awaited[outcome.node, outcome.model] = self._clock()
            pending.outcome.set_result(outcome)
        else:
            pending.outcome.set_exception(outcome)
            # retrieve the exception, so that asyncio logs nothing if no request waits any more
            pending.outcome.exception()

    def _drop_if_unused(self, pending: PendingLoad) -> None:
        """Remove a pending load if no request waits for the model and its load has not started."""
        if not pending.has_waiters() and pending.job is None and self._pending.get(pending.model) is pending:
            del self._pending[pending.model]

    def _eta(self, pending: PendingLoad) -> float | None:
        if pending.job is not None:
            return pending.job.progress().eta_secs
        if pending.delayed is None or pending.delayed.until == inf:
            return None
        usual_secs = self.snapshot().measured_load_secs(pending.delayed.node, pending.model)
        return max(0.0, pending.delayed.until - self._clock()) + (usual_secs or 0.0)

    def _unload_idle(self) -> None:
        """Start to unload the models that were idle for `idle_ttl_secs`."""
        for pair in expired_models(self.snapshot()):
            if pair not in self._unload_tasks:
                task = self._unload_tasks[pair] = asyncio.create_task(self._unload(pair), name=f"unload {pair}")
                task.add_done_callback(lambda _, pair=pair: self._unload_tasks.pop(pair))

    async def _unload(self, pair: Pair) -> None:
        try:
            residents = self.snapshot().residents(self._fleet.node(pair[0]))
            megabytes = next((resident.megabytes for resident in residents if resident.model == pair[1]), {})
            with self._dependencies.drains.draining(pair, megabytes) as drain:
                await drain.idle(is_needed=lambda: False)
                await drain.unload()
        except (StillNeededError, KeyError):
            return  # a request needs the model, or its node was removed from the configuration
        except NodeError as error:
            log.warning("unloading %s on %s failed: %s", pair[1], pair[0], error)
            await asyncio.sleep(_UNLOAD_BACKOFF_SECS)


def _eviction_note(cold: ColdPlacement) -> str:
    return f" instead of {', '.join(cold.evict)}" if cold.evict else ""
