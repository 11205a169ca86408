"""Explains in words where a request for a model would be sent now, and why.

All functions are pure functions of a `FleetSnapshot`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isinf
from typing import Any

from helexa.core.catalogue import Profile
from helexa.core.errors import ApiError
from helexa.cortex.fleet.fleet_view import Node
from helexa.cortex.lifecycle.evictor import EvictionPlan, plan_eviction
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot, ResidentModel
from helexa.cortex.lifecycle.hardware_fit import DevicePool, device_pools, misfit
from helexa.cortex.lifecycle.placement import ColdPlacement, allowed, place
from helexa.cortex.routing.router import breaker_error, candidates, has_warm, route


@dataclass(frozen=True)
class _Explanation:
    decision: str
    reason: str
    node: str | None = None
    evict: list[str] = field(default_factory=list[str])
    retry_after: int | None = None


def explain(snapshot: FleetSnapshot, name: str) -> dict[str, Any]:
    """Return the gateway's decision for a request that arrives now and names the model `name` (an id or an alias).

    Returns:
        A dict with these keys:
        * `model`: the model id
        * `decision`: `warm` (a node has the model loaded), `load` (the model is loaded now), `wait` (the load must
          wait), or `refuse` (the request is rejected)
        * `node`: the node's name; None if the request is rejected
        * `reason`: explanation of the decision
        * `evict`: models to unload before the load
        * `retry_after`: seconds until a retry may succeed, or None
        * `candidates`: one dict per node with the keys `node` (the node's name), `warm` (whether the node has the model
          loaded) and `verdict` (whether the node can serve or load the model, and why)
    """
    model = snapshot.catalogue.resolve(name)
    explanation = _explanation(snapshot, model)
    return {
        "model": model,
        "decision": explanation.decision,
        "node": explanation.node,
        "reason": explanation.reason,
        "evict": explanation.evict,
        "retry_after": explanation.retry_after,
        "candidates": [
            {"node": node.name, "warm": has_warm(node, model), "verdict": _verdict(snapshot, node, model)}
            for node in snapshot.view.nodes
        ],
    }


def _explanation(snapshot: FleetSnapshot, model: str) -> _Explanation:
    target = route(snapshot.view, model)
    if target is not None:
        return _Explanation("warm", _warm_text(snapshot, model), target.node)
    failure = breaker_error(snapshot.view, model)
    if failure is not None:
        return _Explanation("refuse", str(failure), retry_after=failure.retry_after)
    try:
        decision = place(snapshot, model, snapshot.now)
    except ApiError as error:
        return _Explanation("refuse", str(error), retry_after=error.retry_after)
    if not isinstance(decision, ColdPlacement):
        wait = "" if isinf(decision.until) else f", at most {_secs(decision.until - snapshot.now)}"
        reason = (
            f"waits until {_names(decision.evict)} can be unloaded{wait}" if decision.evict else "waits for its turn"
        )
        return _Explanation("wait", reason, decision.node, list(decision.evict))
    secs = snapshot.measured_load_secs(decision.node, model)
    duration_text = "" if secs is None else f", which takes about {_secs(secs)}"
    if decision.joined:
        return _Explanation("load", f"is already loading there{duration_text}", decision.node)
    step_text = f"loads after unloading {_names(decision.evict)}" if decision.evict else "loads into free memory"
    return _Explanation("load", step_text + duration_text, decision.node, list(decision.evict))


def _warm_text(snapshot: FleetSnapshot, model: str) -> str:
    serving_nodes = candidates(snapshot.view, model)
    loads = [f"{node.name} has {snapshot.view.load(node, model)} in flight" for node in serving_nodes]
    return f"warm: {', '.join(loads)}"


def _verdict(snapshot: FleetSnapshot, node: Node, model: str) -> str:
    """Return a text that says whether the node can serve or load the model, and why."""
    fleet_view, profile = snapshot.view, snapshot.catalogue.profile(model)
    pair = (node.name, model)
    if not node.healthy:
        return "down"
    if node.cordoned:
        return "cordoned"
    if pair in fleet_view.draining:
        return "has it, but is about to unload it"
    if pair in fleet_view.open:
        return "has it, but requests for it keep failing there"
    if has_warm(node, model):
        return f"has it warm, {fleet_view.load(node, model)} in flight"
    if pair in fleet_view.loading or model in node.activating():
        return "is loading it"
    info = node.models.get(model)
    if info is not None and info.status != "unloaded":
        detail = f": {info.servable.reason}" if info.servable and info.servable.reason else ""
        return f"has it {info.status}, but cannot serve it{detail}"
    if node.kind != "neuron":
        return "does not load models on demand"
    if profile is None:
        return "does not have it, and it is not in the catalogue"
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
    return _memory_verdict(snapshot, node, profile)


def _memory_verdict(snapshot: FleetSnapshot, node: Node, profile: Profile) -> str:
    plan = plan_eviction(snapshot, node, profile, snapshot.now)
    free_mb = snapshot.free(node)
    pools = device_pools(profile, node.discovery) if node.discovery is not None else []
    available_mb = max((_most_free(free_mb, pool) for pool in pools), default=0)
    memory_text = f"needs {snapshot.needs_mb(profile.id) or 'an unknown number of'} MB, {max(available_mb, 0)} free"
    if plan is None:
        obstacles = [_obstacle(snapshot, resident, profile) for resident in snapshot.residents(node)]
        return f"{memory_text}, and its models cannot be evicted: {'; '.join(obstacles)}"
    if not plan.evict:
        return memory_text if plan.fits else f"{memory_text}: less than the estimate, but the node is empty"
    return f"{memory_text}, {_eviction(snapshot, plan)}"


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
    """Return the free MB of the devices with the most free memory of a pool."""
    return sum(sorted((free_mb.get(device, 0) for device in pool.devices), reverse=True)[: pool.count])


def _names(names: list[str] | tuple[str, ...]) -> str:
    return " and ".join(names)


def _secs(secs: float) -> str:
    return f"{round(secs)} s"
