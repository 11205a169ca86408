"""The model manager: loads requested models, and evicts models to free memory."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf

from helexa.core.catalog import Catalog
from helexa.core.errors import ApiError, HelexaError, internal_error, model_not_found, shutting_down
from helexa.core.logs import quoted
from helexa.cortex.config import CortexConfig
from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.fleet_view import is_sleeping, local_profile, sleeping_profile
from helexa.cortex.fleet.node_client import NodeClient, or_none
from helexa.cortex.fleet.node_errors import MemoryRejection, NodeError
from helexa.cortex.lifecycle.evictor import expired_models, expiry
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot
from helexa.cortex.lifecycle.load_history import LoadHistory
from helexa.cortex.lifecycle.load_job import LoadDependencies, LoadJob, Progress, reported_progress
from helexa.cortex.lifecycle.load_queue import (
    LoadFailure,
    LoadReport,
    PendingLoad,
    QueuedModel,
    WaitingRequest,
    decide,
    wait_until_loaded,
)
from helexa.cortex.lifecycle.memory import Megabytes, MemoryEstimator
from helexa.cortex.lifecycle.model_drain import Drains, StillNeededError
from helexa.cortex.lifecycle.placement import ColdPlacement, DelayedPlacement, feasible, spec_on
from helexa.cortex.routing import WarmRoute, has_warm, route

log = logging.getLogger(__name__)

HOLD_SECS = 0.1  # interval between decisions while a load waits for its start
REST_SECS = 5.0  # longest interval between decisions while no load waits for its start
SHOW_FAILURE_SECS = 600.0  # a failed load is reported until this long after its next attempt was due
_UNLOAD_BACKOFF_SECS = 60.0

ModelCallback = Callable[[str, str], None]  # callback that receives a model id and a node name

PendingKey = tuple[str, str | None]  # model id, and the node that an administrator has chosen (None: no choice)


class Lifecycle:
    """Manages loads, evictions and the queue of requests that wait for loads.

    The caller must run the method `run` as a background task. `loaded` is called after each successful load, and
    `evicted` after each unload (not if a model is put to sleep), with the model id and the node name.
    """

    def __init__(
        self,
        fleet: Fleet,
        client: NodeClient,
        config: CortexConfig,
        catalog: Catalog,
        *,
        loaded: ModelCallback,
        evicted: ModelCallback,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._loaded = loaded
        self._clock = clock
        self._began = clock()
        self._history = LoadHistory()
        self._memory = MemoryEstimator()
        drains = Drains(fleet, client, self._memory, clock, evicted)
        self._client = client
        self._dependencies = LoadDependencies(fleet, client, self._memory, drains, clock)
        self._pending: dict[PendingKey, PendingLoad] = {}
        self._jobs: dict[PendingKey, asyncio.Task[WarmRoute]] = {}
        self._unload_tasks: dict[Pair, asyncio.Task[None]] = {}
        self._keep_tasks: set[asyncio.Task[None]] = set()
        # (node, model) pairs for which the node was asked to keep the model awake, because this gateway decides when
        # the model is unloaded. The value is the time of the model's load, or None if unknown. After another load, the
        # node must be asked again.
        self._kept_awake: dict[Pair, float | None] = {}
        self._estimates: dict[str, asyncio.Future[int | None]] = {}
        self._wake = asyncio.Event()
        self.configure(config, catalog)

    def configure(self, config: CortexConfig, catalog: Catalog) -> None:
        """Apply a new configuration and catalog, and allow failed loads again at once."""
        self._gateway, self._eviction, self._catalog = config.gateway, config.eviction, catalog
        self._dependencies.drains.warn_after = config.eviction.defrag_after_cycles
        self._history.estimates_mb.clear()
        self._history.failures.clear()  # the new configuration may have fixed the causes

    async def serve(self, model: str, waiting: WaitingRequest) -> WarmRoute:
        """Return the node and URL that serve `model`, loaded first if necessary.

        If the caller is canceled, a running load continues, unless it still waits for a model to evict and no other
        request waits for it.

        Raises:
            ApiError: 404 for an unknown model; 503 with the reason if the model cannot be served, with Retry-After if a
                later request may succeed; 500 after an internal error.
        """
        return await self._warm(PendingLoad(model), waiting, self._gateway.load_wait_secs)

    async def load(self, model: str, node: str | None, waiting: WaitingRequest, wait_secs: float) -> WarmRoute:
        """Load a model for an administrator; return the node that serves it.

        Args:
            node: name of the node to load on, or None to let the gateway choose if no node has the model loaded.
            wait_secs: seconds after which the request is rejected. A load that has started continues.

        Raises:
            ApiError: 404 for an unknown model; 503 with the reason if the model cannot be loaded.
        """
        self._history.forget_failures(model, node)
        return await self._warm(PendingLoad(model, node, by_admin=True), waiting, wait_secs)

    async def _warm(self, new: PendingLoad, waiting: WaitingRequest, wait_secs: float) -> WarmRoute:
        """Return the node that serves the model of `new`; join or start a load if needed."""
        target = self._target(new)
        if target is not None:
            return target
        if _key(new) not in self._pending:
            await self.estimate(new.model)
        # Another request may have begun the same load during the `await`.
        pending = self._pending.setdefault(_key(new), new)
        try:
            with pending.waiting(waiting):
                if pending is new:  # later requests for the same model join the pending load
                    self._decide()
                    self._wake.set()
                remaining = waiting.enqueued + wait_secs - self._clock()
                return await wait_until_loaded(pending, remaining, lambda: self._eta(pending))
        finally:
            self._drop_if_unused(pending)

    async def estimate(self, model: str) -> None:
        """Ask a node how much memory a model needs, if the need is not known yet.

        The node reads the headers of the model's files, or asks the hub for the sizes of the files. The result is
        stored, even if it is unknown, so that no node is asked again.
        """
        snapshot = self.snapshot()
        profile = snapshot.profile(model) or local_profile(snapshot.view, model, requested=True)
        if profile is None or snapshot.needs_mb(model) or model in self._history.estimates_mb:
            return
        if sleeping_profile(snapshot.view, model) is not None:
            return  # the model sleeps on a node, and this node knows how much memory the model needs
        nodes = [node for node in snapshot.view.nodes if node.healthy and node.local is not None]
        node = next((node for node in nodes if feasible(profile, node)), None)
        if node is None:
            return
        # Concurrent requests for the model share one call.
        if model not in self._estimates:
            spec, bearer = spec_on(snapshot, node, profile, ()), self._fleet.bearer(node.name)
            call = or_none(self._client.estimate_mb, node.endpoint, spec, bearer)
            self._estimates[model] = asyncio.ensure_future(call)
        estimate = self._estimates[model]
        # Unlike `await estimate`, `wait` does not cancel the shared call if this caller is canceled.
        await asyncio.wait([estimate])
        self._estimates.pop(model, None)
        # Store 0 for an unknown size, so that no node is asked again.
        self._history.estimates_mb[model] = max(0, estimate.result() or 0)

    def _target(self, pending: PendingLoad) -> WarmRoute | None:
        """Return a route to a node that already serves the model; None if no node does."""
        view = self._fleet.view()
        if pending.node is None:
            return route(view, pending.model)
        return route(view, pending.model, avoid={node.name for node in view.nodes} - {pending.node})

    async def unload(self, model: str, node: str) -> None:
        """Unload a model for an administrator, once it is idle.

        Raises:
            ApiError: 404 if the node does not have the model loaded; 409 if the model is loading or is being unloaded,
                or if its requests do not end within five minutes; 502 if the node rejects the unload or does not
                respond.
            KeyError: the node is not configured.
        """
        view, pair = self._fleet.view(), (node, model)
        info = self._fleet.node(node).models.get(model)
        if pair in view.draining:
            raise ApiError(
                409, "model_busy", f"model '{model}' is already being unloaded from node '{node}'; try again later"
            )
        if pair in view.loading or (info is not None and info.status == "loading"):
            raise ApiError(
                409, "model_busy", f"model '{model}' is still loading on node '{node}'; try again when it is loaded"
            )
        if info is None or info.status == "unloaded":
            raise model_not_found(model, f"node '{node}' has not loaded this model")
        try:
            await self._drain_and_unload(pair, is_needed=True)
        except StillNeededError:
            message = f"requests for model '{model}' still run on node '{node}'; unload it when they have ended"
            raise ApiError(409, "model_busy", message) from None
        except NodeError as error:
            raise ApiError(502, "node_error", f"node '{node}' did not unload model '{model}': {error}") from None

    def keep(self, model: str, secs: float) -> None:
        """Unload `model` once it has been idle for `secs` seconds; never if negative.

        `secs` replaces the setting `idle_ttl_secs` for this model. Unless `secs` is 0, nodes that have the model loaded
        no longer put it to sleep when it is idle. Both hold until the next call for the model, or until no node has the
        model any more. If no node has the model now, the call does nothing.
        """
        view = self._fleet.view()
        if not view.has_model(model):
            return
        self._history.keep_secs[model] = inf if secs < 0 else secs
        self._wake.set()
        for node in view.nodes if secs else ():
            pair, loaded_at = (node.name, model), view.loaded_at.get((node.name, model))
            if node.kind != "neuron" or not has_warm(node, model) or self._kept_awake.get(pair, -1.0) == loaded_at:
                continue
            self._kept_awake[pair] = loaded_at
            call = or_none(self._client.keep_awake, node.endpoint, model, self._fleet.bearer(node.name))
            task = asyncio.create_task(call)
            self._keep_tasks.add(task)
            task.add_done_callback(self._keep_tasks.discard)

    def cleared(self, model: str, node: str) -> None:
        """Record that a node has deleted the cached prompts of a model."""
        self._history.forget_prompts(self._fleet.view(), (node, model))

    def progress(self, model: str) -> Progress | None:
        """Return the progress of a model that is loading or waits for its load, else None."""
        pending = self._pending.get((model, None))
        if pending is not None and pending.job is not None:
            return pending.job.progress()
        for node in self._fleet.view().nodes:
            info = node.models.get(model)
            if node.healthy and (model in node.activating() or (info is not None and info.status == "loading")):
                return Progress(*reported_progress(node, model))
        if pending is not None and pending.delayed is not None:
            return Progress(None, f"waiting for memory on {pending.delayed.node}", self._eta(pending))
        return None

    def loads(self) -> LoadReport:
        """Return the gateway's loads, recent failures, and unload times of idle models."""
        loads: dict[Pair, Progress] = {}
        for pending in self._pending.values():
            if pending.job is not None:
                loads[pending.job.pair] = pending.job.progress()
            elif pending.delayed is not None:
                loads[pending.delayed.node, pending.model] = Progress(None, "waiting for memory", self._eta(pending))
        now, offset = self._clock(), time.time() - self._clock()
        failures = {
            pair: LoadFailure(failure.message, failure.temporary, failure.times, round(failure.retry_at + offset))
            for pair, failure in self._history.failures.items()
            if failure.retry_at > now - SHOW_FAILURE_SECS
        }
        return LoadReport(loads, failures, self._unload_times(offset))

    def _unload_times(self, offset: float) -> dict[Pair, int]:
        """Return when idle models will be unloaded (Unix seconds).

        `offset` is the difference between Unix seconds and the seconds of this gateway's monotonic clock.
        """
        if not (self._eviction.idle_ttl_secs or self._history.keep_secs):
            return {}
        snapshot = self.snapshot()
        times = {
            (node.name, resident.model): expiry(snapshot, resident)
            for node in snapshot.view.nodes
            if node.healthy and node.kind == "neuron"
            for resident in snapshot.residents(node)
        }
        return {pair: round(time + offset) for pair, time in times.items() if time is not None}

    def snapshot(self) -> FleetSnapshot:
        """Return the current state, on which decisions are based."""
        fleet_view = self._fleet.view()
        for node in fleet_view.nodes:
            self._memory.update(node)
        self._history.look(fleet_view)
        return FleetSnapshot(
            fleet_view,
            self._catalog,
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
            self._history.required_mb,
            self._history.keep_secs,
            frozenset(pending.model for pending in self._pending.values() if pending.by_admin),
            self._history.estimates_mb,
            self._history.saved_prompts,
        )

    async def run(self) -> None:
        """Start waiting loads and unload idle models periodically, until canceled."""
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
                log.exception("unexpected error while deciding on loads; the next decision will try again")

    async def close(self) -> None:
        """Cancel all loads and reject the waiting requests."""
        tasks = [*self._jobs.values(), *self._unload_tasks.values(), *self._keep_tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pending in list(self._pending.values()):
            self._resolve(pending, shutting_down())

    def _decide(self) -> None:
        """Start pending loads that can start now; end those that need or permit no load."""
        # If a node has loaded the model in the meantime, forward the waiting requests to this node instead. If the
        # model cannot be loaded, reject the waiting requests.
        without_job = [pending for pending in self._pending.values() if pending.job is None]
        for pending in without_job:
            target = self._target(pending)
            if target is not None:
                self._resolve(pending, target)
        queue = [pending.queued for pending in without_job if not pending.outcome.done()]
        for queue_verdict in decide(queue, self.snapshot, self._start):
            pending = self._pending[_key(queue_verdict.queued)]
            pending.delayed = queue_verdict.decision if isinstance(queue_verdict.decision, DelayedPlacement) else None
            if isinstance(queue_verdict.decision, ApiError):
                self._resolve(pending, queue_verdict.decision)

    def _start(self, queued: QueuedModel, cold: ColdPlacement) -> None:
        pending, snapshot = self._pending[_key(queued)], self.snapshot()
        node = self._fleet.node(cold.node)
        resident_mb: dict[str, Megabytes] = {
            resident.model: resident.megabytes for resident in snapshot.residents(node)
        }
        usual_secs = snapshot.measured_load_secs(cold.node, cold.model)
        size_mb = snapshot.size_mb(node, cold.model)
        unlisted = {evicted for evicted in cold.evict if snapshot.profile(evicted) is None}
        pending.job = job = LoadJob(cold, size_mb, resident_mb, self._dependencies, usual_secs, unlisted)
        self._history.devices[job.pair] = tuple(cold.spec.devices or ())
        log.info("load began model=%s node=%s evicts=%s", quoted(cold.model), cold.node, ",".join(cold.evict) or "-")
        task = asyncio.create_task(
            job.run(pending.has_waiters, self._gateway.load_timeout_secs), name=f"load {job.pair}"
        )
        self._jobs[_key(queued)] = task
        task.add_done_callback(lambda task: self._on_load_done(pending, job, task))

    def _on_load_done(self, pending: PendingLoad, job: LoadJob, task: asyncio.Task[WarmRoute]) -> None:
        job.release()
        del self._jobs[_key(pending)]
        pending.job = None
        # `close` has canceled the task, and rejects the waiting requests itself.
        if task.cancelled():
            return
        error, (node, model) = task.exception(), job.pair
        if error is None:
            self._history.loaded(job.pair, job.secs)
            self._loaded(model, node)
            log.info("model loaded model=%s node=%s", quoted(model), node)
            self._resolve(pending, task.result())
        elif isinstance(error, NodeError) and error.memory is not None and self._replans(job, error.memory):
            # The next decision uses the needed and free memory that the node stated, and may evict other models.
            needed_mb, free_mb = error.memory.required_mb, error.memory.free_mb
            log.info(
                "node lacks memory model=%s node=%s needed_mb=%d free_mb=%d", quoted(model), node, needed_mb, free_mb
            )
        elif isinstance(error, NodeError):
            log.warning(
                "load failed model=%s node=%s error=%s; a request after a pause tries again",
                quoted(model),
                node,
                quoted(error),
            )
            message = f"model '{model}' could not be loaded on node '{node}': {error}"
            self._history.failed(job.pair, message, self._clock(), temporary=error.temporary)
        # After a StillNeededError, the requests wait for the next decision.
        elif not isinstance(error, StillNeededError):
            log.error(
                "load failed with an internal error model=%s node=%s; the requests for this model got 500",
                *(quoted(model), node),
                exc_info=error,
            )
            self._resolve(pending, internal_error())
        self._drop_if_unused(pending)
        self._wake.set()

    def _replans(self, job: LoadJob, memory: MemoryRejection) -> bool:
        """Record a load rejected for lack of memory; return whether to plan it again."""
        with suppress(KeyError):  # the node was removed from the configuration
            node = self._fleet.node(job.pair[0])
            self._memory.correct(node, dict.fromkeys(job.devices, memory.free_mb), self._clock())
            if not is_sleeping(node, job.pair[1]):  # after a failed wake, the model still sleeps
                self._fleet.unloaded(*job.pair)  # the last poll may have reported that the model is loading
        return self._history.lacks_memory(job.pair, memory.required_mb)

    def _resolve(self, pending: PendingLoad, outcome: WarmRoute | HelexaError) -> None:
        """Remove a pending load, and pass `outcome` to all requests that wait for it."""
        self._pending.pop(_key(pending), None)
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
        """Remove a load that has not started, if no request waits for it."""
        if not pending.has_waiters() and pending.job is None and self._pending.get(_key(pending)) is pending:
            del self._pending[_key(pending)]

    def _eta(self, pending: PendingLoad) -> float | None:
        if pending.job is not None:
            return pending.job.progress().eta_secs
        if pending.delayed is None or pending.delayed.until == inf:
            return None
        usual_secs = self.snapshot().measured_load_secs(pending.delayed.node, pending.model)
        return max(0.0, pending.delayed.until - self._clock()) + (usual_secs or 0.0)

    def _unload_idle(self) -> None:
        """Start to unload the models whose idle time has passed."""
        for pair in expired_models(self.snapshot()):
            if pair not in self._unload_tasks:
                task = self._unload_tasks[pair] = asyncio.create_task(self._unload(pair), name=f"unload {pair}")
                task.add_done_callback(lambda _, pair=pair: self._unload_tasks.pop(pair))

    async def _unload(self, pair: Pair) -> None:
        try:
            await self._drain_and_unload(pair, is_needed=False)
        except (StillNeededError, KeyError):
            return  # a request needs the model, or its node was removed from the configuration
        except NodeError as error:
            log.warning(
                "unload failed model=%s node=%s error=%s; the unload is tried again",
                quoted(pair[1]),
                pair[0],
                quoted(error),
            )
            # The task stays registered during the pause, so the unload is not tried again at once.
            await asyncio.sleep(_UNLOAD_BACKOFF_SECS)

    async def _drain_and_unload(self, pair: Pair, *, is_needed: bool) -> None:
        residents = self.snapshot().residents(self._fleet.node(pair[0]))
        megabytes = next((resident.megabytes for resident in residents if resident.model == pair[1]), {})
        with self._dependencies.drains.draining(pair, megabytes) as drain:
            await drain.idle(is_needed=lambda: is_needed)
            await drain.unload()


def _key(queued: QueuedModel | PendingLoad) -> PendingKey:
    return queued.model, queued.node
