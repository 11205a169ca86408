"""The gateway's model manager: starts all loads and evictions that requests make necessary."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from math import ceil, inf

from helexa.core.catalogue import Catalogue
from helexa.core.errors import ApiError, HelexaError, internal_error, service_unavailable, shutting_down
from helexa.cortex.config import CortexConfig
from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.node_client import NodeClient, NodeError
from helexa.cortex.lifecycle.drain import Drains, StillNeededError
from helexa.cortex.lifecycle.evictor import expired
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot
from helexa.cortex.lifecycle.history import History
from helexa.cortex.lifecycle.load_job import LoadDependencies, LoadJob, Progress, reported_progress
from helexa.cortex.lifecycle.memory import Megabytes, MemoryBook
from helexa.cortex.lifecycle.pending_loads import PendingLoads, Waiting
from helexa.cortex.lifecycle.placement import Cold, Hold
from helexa.cortex.lifecycle.swap_queue import Wanted, decide
from helexa.cortex.routing.router import Warm, route

log = logging.getLogger(__name__)

HOLD_SECS = 0.1  # interval between decisions while a request waits for a load to start
REST_SECS = 5.0  # longest interval between decisions otherwise
RETRY_UNKNOWN = 10
MAX_RETRY_SECS = 3600
_UNLOAD_BACKOFF_SECS = 60.0

Told = Callable[[str, str], None]
"""Callback that receives a model and a node."""


class Lifecycle:
    """Owns loads, evictions and the queue of requests that wait for them.

    `run` must run as a background task.

    Args:
        loaded: called with the model and the node after every successful load.
        evicted: called with the model and the node after every unload.
    """

    def __init__(
        self,
        fleet: Fleet,
        client: NodeClient,
        config: CortexConfig,
        catalogue: Catalogue,
        *,
        loaded: Told,
        evicted: Told,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._loaded = loaded
        self._clock = clock
        self._began = clock()
        self._history = History()
        self._book = MemoryBook()
        departures = Drains(fleet, client, self._book, clock, evicted)
        self._means = LoadDependencies(fleet, client, self._book, departures, clock)
        self._demands: dict[str, PendingLoads] = {}
        self._jobs: dict[str, asyncio.Task[Warm]] = {}
        self._leaving: dict[Pair, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self.configure(config, catalogue)

    def configure(self, config: CortexConfig, catalogue: Catalogue) -> None:
        """Apply a new configuration and catalogue."""
        self._gateway, self._eviction, self._catalogue = config.gateway, config.eviction, catalogue
        self._means.departures.warn_after = config.eviction.defrag_after_cycles
        self._history.failures.clear()  # the new configuration may have fixed their causes

    async def serve(self, model: str, waiting: Waiting) -> Warm:
        """Return the node and URL that serve `model`, after loading the model if necessary.

        A load continues if the caller is cancelled.

        Raises:
            ApiError: 404 for an unknown model; 503 with the reason if the model cannot be served, with Retry-After if a
                later request may succeed.
        """
        target = route(self._fleet.view(), model)
        if target is not None:
            return target
        demand, is_first = self._demands.get(model), False
        if demand is None:
            demand, is_first = PendingLoads(model), True
            self._demands[model] = demand
        wait_limit_secs = self._gateway.load_wait_secs
        try:
            with demand.waiting(waiting):
                if is_first:  # later requests for the same model join the pending load
                    self._decide()
                    self._wake.set()
                remaining = waiting.enqueued + wait_limit_secs - self._clock()
                eta = self._eta(demand)
                if not demand.outcome.done() and eta is not None and eta > 2 * max(remaining, 1.0):
                    raise self._too_long(demand)
                async with asyncio.timeout(max(0.0, remaining)):
                    return await asyncio.shield(demand.outcome)
        except TimeoutError:
            raise self._too_long(demand) from None
        finally:
            self._forget(demand)

    def progress(self, model: str) -> Progress | None:
        """Return the progress of a model that loads or waits for memory, or None if unknown."""
        demand = self._demands.get(model)
        if demand is not None and demand.job is not None:
            return demand.job.progress()
        for node in self._fleet.view().nodes:
            info = node.models.get(model)
            if node.healthy and (model in node.activating() or (info is not None and info.status == "loading")):
                return Progress(*reported_progress(node, model))
        if demand is not None and demand.hold is not None:
            return Progress(None, f"waiting for room on {demand.hold.node}", self._eta(demand))
        return None

    def situation(self) -> FleetSnapshot:
        """Return a snapshot of everything that load and eviction decisions depend on."""
        fleet_view = self._fleet.view()
        for node in fleet_view.nodes:
            self._book.turn(node)
        self._history.look(fleet_view)
        return FleetSnapshot(
            fleet_view,
            self._catalogue,
            self._clock(),
            self._began,
            self._eviction,
            self._book.expected_free(),
            self._book.reserved(),
            self._history.load_secs,
            self._history.failures,
            self._history.devices,
            self._history.sizes_mb,
            self._history.awaited,
        )

    async def run(self) -> None:
        """Start pending loads and unload idle models periodically, until cancelled."""
        while True:
            any_waiting = any(demand.job is None for demand in self._demands.values())
            rest_secs = min(REST_SECS, self._eviction.idle_ttl_secs / 4 or inf)
            with suppress(TimeoutError):
                async with asyncio.timeout(HOLD_SECS if any_waiting else rest_secs):
                    await self._wake.wait()
            self._wake.clear()
            try:
                self._decide()
                self._let_go()
            except Exception:
                log.exception("a fault in deciding on loads")

    async def close(self) -> None:
        """Cancel all loads and reject the waiting requests."""
        tasks = [*self._jobs.values(), *self._leaving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for demand in list(self._demands.values()):
            self._end(demand, shutting_down())

    def _decide(self) -> None:
        """Start every load that can start now."""
        without_job = [demand for demand in self._demands.values() if demand.job is None]
        for demand in without_job:
            target = route(self._fleet.view(), demand.model)
            if target is not None:
                self._end(demand, target)
        queue = [demand for demand in without_job if not demand.outcome.done()]
        for queue_verdict in decide(queue, self.situation, self._start):
            demand = self._demands[queue_verdict.wanted.model]
            demand.hold = queue_verdict.decision if isinstance(queue_verdict.decision, Hold) else None
            if isinstance(queue_verdict.decision, ApiError):
                self._end(demand, queue_verdict.decision)

    def _start(self, wanted: Wanted, cold: Cold) -> None:
        demand, situation = self._demands[wanted.model], self.situation()
        node = self._fleet.node(cold.node)
        resident_mb: dict[str, Megabytes] = {
            resident.model: resident.megabytes for resident in situation.residents(node)
        }
        usual_secs = situation.measured_load_secs(cold.node, cold.model)
        size_mb = situation.size_mb(node, cold.model)
        demand.job = job = LoadJob(cold, size_mb, resident_mb, self._means, usual_secs)
        self._history.devices[job.pair] = tuple(cold.spec.devices or ())
        log.info("loading %s on %s%s", cold.model, cold.node, _instead_of(cold))
        task = asyncio.create_task(job.run(demand.wanted, self._gateway.load_timeout_secs), name=f"load {job.pair}")
        self._jobs[cold.model] = task
        task.add_done_callback(lambda task: self._finished(demand, job, task))

    def _finished(self, demand: PendingLoads, job: LoadJob, task: asyncio.Task[Warm]) -> None:
        job.release()
        del self._jobs[demand.model]
        demand.job = None
        if task.cancelled():
            return
        error, (node, model) = task.exception(), job.pair
        if error is None:
            self._history.loaded(job.pair, job.secs)
            self._loaded(model, node)
            log.info("loaded %s on %s", model, node)
            self._end(demand, task.result())
        elif isinstance(error, NodeError):
            message = f"model '{model}' could not be loaded on node '{node}': {error}"
            log.warning("%s", message)
            self._history.failed(job.pair, message, self._clock(), temporary=error.temporary)
        elif not isinstance(error, StillNeededError):
            log.error("a fault in loading %s", model, exc_info=error)
            self._end(demand, internal_error())
        self._forget(demand)
        self._wake.set()

    def _end(self, demand: PendingLoads, outcome: Warm | HelexaError) -> None:
        """Resolve all requests that wait for a model, with a node or an error."""
        self._demands.pop(demand.model, None)
        if demand.outcome.done():
            return
        if isinstance(outcome, Warm):
            self._history.awaited[outcome.node, outcome.model] = self._clock()
            demand.outcome.set_result(outcome)
        else:
            demand.outcome.set_exception(outcome)
            demand.outcome.exception()  # marks the exception as retrieved, in case no request waits any more

    def _forget(self, demand: PendingLoads) -> None:
        """Drop the entry of a model if no request waits for the model and no load runs."""
        if not demand.wanted() and demand.job is None and self._demands.get(demand.model) is demand:
            del self._demands[demand.model]

    def _eta(self, demand: PendingLoads) -> float | None:
        if demand.job is not None:
            return demand.job.progress().eta_secs
        if demand.hold is None or demand.hold.until == inf:
            return None
        usual_secs = self.situation().measured_load_secs(demand.hold.node, demand.model)
        return max(0.0, demand.hold.until - self._clock()) + (usual_secs or 0.0)

    def _too_long(self, demand: PendingLoads) -> ApiError:
        eta = self._eta(demand)
        retry_after = RETRY_UNKNOWN if eta is None else min(max(1, ceil(eta)), MAX_RETRY_SECS)
        state = "is still loading" if demand.job is not None else "still waits for room"
        return service_unavailable(f"model '{demand.model}' {state}", retry_after)

    def _let_go(self) -> None:
        """Unload models that were idle for `idle_ttl_secs`."""
        for pair in expired(self.situation()):
            if pair not in self._leaving:
                task = self._leaving[pair] = asyncio.create_task(self._unload(pair), name=f"unload {pair}")
                task.add_done_callback(lambda _, pair=pair: self._leaving.pop(pair))

    async def _unload(self, pair: Pair) -> None:
        try:
            residents = self.situation().residents(self._fleet.node(pair[0]))
            megabytes = next((resident.megabytes for resident in residents if resident.model == pair[1]), {})
            with self._means.departures.departing(pair, megabytes) as drain:
                await drain.idle(wanted=lambda: False)
                await drain.unload()
        except (StillNeededError, KeyError):
            return  # a request needs the model, or its node was removed from the configuration
        except NodeError as error:
            log.warning("unloading %s on %s failed: %s", pair[1], pair[0], error)
            await asyncio.sleep(_UNLOAD_BACKOFF_SECS)


def _instead_of(cold: Cold) -> str:
    return f" instead of {', '.join(cold.evict)}" if cold.evict else ""
