"""Explains in words where a request for a model would be sent now, and why.

All functions are pure functions of a `FleetSnapshot`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf
from typing import Literal

from helexa.core.catalog import Profile
from helexa.core.display import memory_text
from helexa.core.errors import ApiError
from helexa.cortex.fleet.breaker import ANY
from helexa.cortex.fleet.fleet_view import Node, is_sleeping
from helexa.cortex.lifecycle.evictor import EvictionPlan, plan_eviction
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot, ResidentModel
from helexa.cortex.lifecycle.memory import DevicePool, device_pools, misfit
from helexa.cortex.lifecycle.placement import ColdPlacement, allowed, place
from helexa.cortex.routing import breaker_error, candidates, has_warm, route


@dataclass(frozen=True)
class Candidate:
    """In an explanation: a node, and whether and why it can serve or load the model."""

    node: str
    warm: bool  # True if the node has the model loaded and can serve it
    verdict: str  # explanation for people


@dataclass(frozen=True)
class Explanation:
    """The gateway's decision for a request that arrives now."""

    model: str
    # `warm` (a node has the model loaded), `load` (the load starts now or is already running), `wait` (the load must
    # wait), or `refuse` (the request is rejected)
    decision: Literal["warm", "load", "wait", "refuse"]
    node: str | None  # the node's name; None if the request is rejected
    reason: str  # explanation of the decision
    evict: list[str]  # models to unload before the load
    retry_after: int | None  # seconds until a retry may succeed; None if unknown or if the request is not rejected
    candidates: list[Candidate]  # one entry per node


def explain(snapshot: FleetSnapshot, name: str) -> Explanation:
    """Explain the decision for a request for the model id or alias `name`."""
    model = snapshot.catalog.resolve(name)

    def explanation(
        decision: Literal["warm", "load", "wait", "refuse"],
        reason: str,
        node: str | None = None,
        evict: Sequence[str] = (),
        retry_after: int | None = None,
    ) -> Explanation:
        nodes = [
            Candidate(node.name, has_warm(node, model), _verdict(snapshot, node, model)) for node in snapshot.view.nodes
        ]
        return Explanation(model, decision, node, reason, list(evict), retry_after, nodes)

    target = route(snapshot.view, model)
    if target is not None:
        return explanation("warm", _warm_text(snapshot, model), target.node)
    failure = breaker_error(snapshot.view, model)
    if failure is not None:
        return explanation("refuse", str(failure), retry_after=failure.retry_after)
    try:
        decision = place(snapshot, model, snapshot.now)
    except ApiError as error:
        return explanation("refuse", str(error), retry_after=error.retry_after)
    if not isinstance(decision, ColdPlacement):
        wait = "" if isinf(decision.until) else f", at most {_secs(decision.until - snapshot.now)}"
        reason = (
            f"waits until {_names(decision.evict)} can be unloaded{wait}" if decision.evict else "waits for its turn"
        )
        return explanation("wait", reason, decision.node, decision.evict)
    secs = snapshot.measured_load_secs(decision.node, model)
    duration_text = "" if secs is None else f", which takes about {_secs(secs)}"
    if decision.joined:
        return explanation("load", f"is already loading there{duration_text}", decision.node)
    node = next(node for node in snapshot.view.nodes if node.name == decision.node)
    step = "wakes" if is_sleeping(node, model) else "loads"
    step_text = f"{step} after unloading {_names(decision.evict)}" if decision.evict else f"{step} into free memory"
    if not snapshot.needs_mb(model):
        step_text = f"{step} if the node's memory suffices, which is unknown until a node has the model's files"
    return explanation("load", step_text + duration_text, decision.node, decision.evict)


def _warm_text(snapshot: FleetSnapshot, model: str) -> str:
    serving_nodes = candidates(snapshot.view, model)
    loads = [f"{node.name} has {snapshot.view.load(node, model)} in flight" for node in serving_nodes]
    return f"warm: {', '.join(loads)}"


def _cached_text(snapshot: FleetSnapshot, node: Node, model: str) -> str:
    """Return the numbers of prompts that a node has cached or saved, as text.

    The text is empty if the node reports no such prompts of the model.
    """
    if not has_warm(node, model):
        saved = len(snapshot.saved_prompts.get((node.name, model), ()))
        return f"; saved beginnings of prompts: {saved}" if saved else ""
    loads = node.health.models if node.health is not None else ()
    load = next((load for load in loads if load.id == model), None)
    counts = {} if load is None else {"in memory": len(load.memory_prefixes), "on disk": len(load.disk_prefixes)}
    places = [f"{count} {place}" for place, count in counts.items() if count]
    return f"; cached beginnings of prompts: {', '.join(places)}" if places else ""


def _verdict(snapshot: FleetSnapshot, node: Node, model: str) -> str:
    """Return a text that says whether the node can serve or load the model, and why."""
    fleet_view, profile = snapshot.view, snapshot.profile(model)
    pair = (node.name, model)
    if not node.healthy:
        return "down"
    if node.cordoned:
        return "cordoned"
    if pair in fleet_view.draining:
        return "has it, but is about to unload it"
    if (*pair, ANY) in fleet_view.open:
        return "has it, but requests for it keep failing there"
    if any(pair == ejected and requester.client == ANY for ejected, requester in fleet_view.ejected):
        return "has it, but fails requests that other nodes serve"
    if has_warm(node, model):
        return f"has it warm, {fleet_view.load(node, model)} in flight{_cached_text(snapshot, node, model)}"
    info = node.models.get(model)
    if pair in fleet_view.loading or model in node.activating() or (info is not None and info.status == "loading"):
        return "is loading it"
    if info is not None and info.status not in ("unloaded", "sleeping"):
        detail = f": {info.servable.reason}" if info.servable and info.servable.reason else ""
        return f"has it {info.status}, but cannot serve it{detail}"
    if node.kind != "neuron":
        return "does not load models on demand"
    if profile is None:
        local = next((local for local in node.local.models if local.id == model), None) if node.local else None
        if local is None:
            return "does not have it, and it is not in the catalog"
        if local.problem is not None:
            return f"has it on its disk, but cannot load it: {local.problem}"
        return "has it on its disk; list it in the catalog, or set local_models = true in [gateway], to serve it"
    if not allowed(profile, node):
        return f"not allowed: pinned on {_names(profile.pinned_on)}"
    if node.discovery is None:
        return "has not reported its hardware yet"
    reason = misfit(profile, node.discovery)
    if reason is not None:
        return f"cannot hold it: {reason}"
    failure = snapshot.failures.get(pair)
    if failure is not None and failure.retry_at > snapshot.now:
        return f"{failure.message}; next attempt in {_secs(failure.retry_at - snapshot.now)}"
    state = "asleep: " if is_sleeping(node, model) else ""
    return state + _memory_verdict(snapshot, node, profile) + _cached_text(snapshot, node, model)


def _memory_verdict(snapshot: FleetSnapshot, node: Node, profile: Profile) -> str:
    plan = plan_eviction(snapshot, node, profile, snapshot.now)
    free_mb = snapshot.free(node)
    pools = device_pools(profile, node.discovery) if node.discovery is not None else []
    available_mb = max((_most_free(free_mb, pool) for pool in pools), default=0)
    needs_mb = snapshot.needs_mb(profile.id, node)
    needs_text = memory_text(needs_mb) if needs_mb else "an unknown amount of memory"
    text = f"needs {needs_text}, {memory_text(max(available_mb, 0))} free"
    if plan is None:
        if not snapshot.residents(node):
            return f"{text}: too little, although the node is empty"
        obstacles = [_obstacle(snapshot, resident, profile) for resident in snapshot.residents(node)]
        return f"{text}, and its models cannot be evicted: {'; '.join(obstacles)}"
    if not plan.evict:
        return text if plan.fits else f"{text}: less than the estimate, but the node is empty"
    return f"{text}, {_eviction(snapshot, plan)}"


def _eviction(snapshot: FleetSnapshot, plan: EvictionPlan) -> str:
    evicted = _names([f"{resident.model} ({_idle_text(snapshot, resident)})" for resident in plan.evict])
    if plan.ready_at <= snapshot.now:
        return f"could evict {evicted}"
    if plan.ready_at == inf:
        return f"could evict {evicted}, after its load has ended"
    return f"could evict {evicted} in {_secs(plan.ready_at - snapshot.now)}"


def _obstacle(snapshot: FleetSnapshot, resident: ResidentModel, profile: Profile) -> str:
    if resident.rank > snapshot.rank(profile.id):
        return f"{resident.model} ranks higher"
    return f"{resident.model} would not free enough"


def _idle_text(snapshot: FleetSnapshot, resident: ResidentModel) -> str:
    if resident.loading:
        return "loading"
    if resident.busy:
        return "in use"
    idle = resident.idle_secs(snapshot.now)
    return "never used" if isinf(idle) else f"idle {_secs(idle)}"


def _most_free(free_mb: Mapping[int, int], pool: DevicePool) -> int:
    """Return the sum of free MB of the `pool.count` devices with the most free memory."""
    return sum(sorted((free_mb.get(device, 0) for device in pool.devices), reverse=True)[: pool.count])


def _names(names: list[str] | tuple[str, ...]) -> str:
    return " and ".join(names)


def _secs(secs: float) -> str:
    return f"{round(secs)} s"
