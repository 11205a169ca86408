"""Explains in words where a request for a model would go now, and why.

Pure functions of a `FleetSnapshot`.
"""

from dataclasses import dataclass, field
from math import inf, isinf
from typing import Any

from helexa.core.catalogue import Profile
from helexa.core.errors import ApiError
from helexa.cortex.fleet.fleet_view import Node
from helexa.cortex.lifecycle.evictor import EvictionPlan, clearing
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot, HeldModel
from helexa.cortex.lifecycle.placement import Cold, feasible, place
from helexa.cortex.routing.router import candidates, failing, has_warm, route


@dataclass(frozen=True)
class _Answer:
    decision: str
    reason: str
    node: str | None = None
    evict: list[str] = field(default_factory=list[str])
    retry_after: int | None = None


def explain(situation: FleetSnapshot, name: str) -> dict[str, Any]:
    """Return the decision for a request for `name` (a model id or an alias) that arrives now.

    Returns:
        A dict with these keys: `model` (the id), `decision` (`warm`, `load`, `wait` or `refuse`), `node` (None if the
            request
        is rejected), `reason`, `evict` (models to unload first), `retry_after` (seconds, if a retry may succeed), and
        `candidates` (for every node: `node`, `warm` and a `verdict` in words).
    """
    model = situation.catalogue.resolve(name)
    answer = _answer(situation, model)
    return {
        "model": model,
        "decision": answer.decision,
        "node": answer.node,
        "reason": answer.reason,
        "evict": answer.evict,
        "retry_after": answer.retry_after,
        "candidates": [
            {"node": node.name, "warm": has_warm(node, model), "verdict": _verdict(situation, node, model)}
            for node in situation.view.nodes
        ],
    }


def _answer(situation: FleetSnapshot, model: str) -> _Answer:
    target = route(situation.view, model)
    if target is not None:
        return _Answer("warm", _warm_words(situation, model), target.node)
    failure = failing(situation.view, model)
    if failure is not None:
        return _Answer("refuse", str(failure), retry_after=failure.retry_after)
    try:
        decision = place(situation, model, situation.now)
    except ApiError as error:
        return _Answer("refuse", str(error), retry_after=error.retry_after)
    if not isinstance(decision, Cold):
        wait = "" if isinf(decision.until) else f", for {_secs(decision.until - situation.now)} at the most"
        reason = f"waits until {_names(decision.evict)} can leave{wait}" if decision.evict else "waits for its turn"
        return _Answer("wait", reason, decision.node, list(decision.evict))
    secs = situation.measured_load_secs(decision.node, model)
    duration_text = "" if secs is None else f", which takes about {_secs(secs)}"
    if decision.joined:
        return _Answer("load", f"is loading there already{duration_text}", decision.node)
    step_text = f"{_names(decision.evict)} leaves, then it loads" if decision.evict else "loads where there is room"
    return _Answer("load", step_text + duration_text, decision.node, list(decision.evict))


def _warm_words(situation: FleetSnapshot, model: str) -> str:
    serving_nodes = candidates(situation.view, model)
    loads = [f"{node.name} has {situation.view.load(node, model)} in flight" for node in serving_nodes]
    return f"warm: {', '.join(loads)}"


def _verdict(situation: FleetSnapshot, node: Node, model: str) -> str:
    """Return in words why a node can or cannot serve the model."""
    fleet_view, profile = situation.view, situation.catalogue.profile(model)
    pair = (node.name, model)
    if not node.healthy:
        return "down"
    if node.cordoned:
        return "cordoned"
    if pair in fleet_view.draining:
        return "has it, but it is about to leave"
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
        return "loads nothing on demand"
    if profile is None:
        return "does not have it, and it is not in the catalogue"
    if profile.pinned_on and node.name not in profile.pinned_on:
        return f"may not have it: pinned on {_names(profile.pinned_on)}"
    if node.discovery is None:
        return "has not told its hardware yet"
    if not feasible(profile, node):
        return f"can never hold it: {_hardware(profile)}"
    failure = situation.failures.get(pair)
    if failure is not None and failure.retry_at > situation.now:
        return f"{failure.message}; tried again in {_secs(failure.retry_at - situation.now)}"
    return _room_words(situation, node, profile)


def _room_words(situation: FleetSnapshot, node: Node, profile: Profile) -> str:
    plan = clearing(situation, node, profile, situation.now)
    free_mb = situation.free(node)
    available_mb = sum(sorted(free_mb.values(), reverse=True)[: profile.min_devices])
    memory_text = f"needs {situation.needs_mb(profile.id) or 'an unknown number of'} MB, {max(available_mb, 0)} free"
    if plan is None:
        obstacles = [_staying(situation, resident, profile) for resident in situation.residents(node)]
        return f"{memory_text}, and what is there may not leave: {'; '.join(obstacles)}"
    if not plan.evict:
        return memory_text if plan.fits else f"{memory_text}: less than the estimate, but empty"
    return f"{memory_text}, {_eviction(situation, plan)}"


def _eviction(situation: FleetSnapshot, way: EvictionPlan) -> str:
    evicted = _names([f"{resident.model} ({_idle(situation, resident)})" for resident in way.evict])
    if way.ready_at <= situation.now:
        return f"could evict {evicted}"
    if way.ready_at == inf:
        return f"could evict {evicted}, once that has loaded"
    return f"could evict {evicted} in {_secs(way.ready_at - situation.now)}"


def _staying(situation: FleetSnapshot, resident: HeldModel, profile: Profile) -> str:
    if resident.rank > situation.rank(profile.id):
        return f"{resident.model} ranks higher"
    return f"{resident.model} would not free enough"


def _idle(situation: FleetSnapshot, resident: HeldModel) -> str:
    if resident.loading:
        return "loading"
    if resident.busy:
        return "in use"
    idle = resident.idle_secs(situation.now)
    return "never used" if isinf(idle) else f"idle {_secs(idle)}"


def _hardware(profile: Profile) -> str:
    floor = f" of {profile.min_device_vram_mb} MB" if profile.min_device_vram_mb else ""
    return f"needs {profile.min_devices} device{'s' if profile.min_devices > 1 else ''}{floor}"


def _names(names: list[str] | tuple[str, ...]) -> str:
    return " and ".join(names)


def _secs(secs: float) -> str:
    return f"{round(secs)} s"
