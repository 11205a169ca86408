"""Placement of a model that is not loaded: chooses the node, the devices, and the models to evict.

All functions are pure functions of a `FleetSnapshot`.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import ceil, inf

from helexa.core.catalogue import Profile
from helexa.core.errors import ApiError, model_not_found, service_unavailable
from helexa.core.fleet import Discovery, ModelSpec
from helexa.cortex.fleet.fleet_view import Node
from helexa.cortex.lifecycle.evictor import EvictionPlan, capable_devices, plan_eviction
from helexa.cortex.lifecycle.fleet_snapshot import Failure, FleetSnapshot
from helexa.cortex.lifecycle.memory import HOST

RECOVERING = ("recovering", "poisoned")

RETRY_NO_NODE = 5
RETRY_RECOVERING = 2
RETRY_NODE_DOWN = 3
RETRY_LOADING = 5
RETRY_UNSERVABLE = 5
RETRY_NO_ROOM = 30


@dataclass(frozen=True)
class Cold:
    """Decision to load a model on a node, or to join its running load.

    Attributes:
        evict: models to evict first.
        joined: True if the load is already running.
    """

    model: str
    node: str
    spec: ModelSpec
    evict: tuple[str, ...] = ()
    joined: bool = False


@dataclass(frozen=True)
class Hold:
    """Decision to wait before a load, because the models to evict are in use or were loaded too recently.

    Attributes:
        node: the node that the model will probably be loaded on.
        evict: models that will probably be evicted first.
        until: latest start of the load (seconds of the fleet's clock); infinity if it must wait for a running load.
    """

    model: str
    node: str
    evict: tuple[str, ...]
    until: float


def place(snapshot: FleetSnapshot, model: str, since: float = inf, claimed: Collection[str] = ()) -> Cold | Hold:
    """Decide on which node to load a model that no node has loaded, or decide that the load must wait.

    Args:
        snapshot: the fleet snapshot.
        model: the model's id.
        since: arrival time of the oldest waiting request (seconds of the fleet's clock).
        claimed: names of nodes that are reserved for models that have waited longer than `swap_wait_secs`.

    Raises:
        ApiError: 404 for an unknown model; 503 if no node can load the model, with Retry-After if a retry may
        succeed.
    """
    healthy = [node for node in snapshot.view.nodes if node.healthy]
    if not healthy:
        raise service_unavailable("no healthy node", RETRY_NO_NODE)
    running_target = _running_load(snapshot, healthy, model)
    if running_target is not None:
        return running_target
    profile = snapshot.catalogue.profile(model)
    loadable = [node for node in healthy if node.kind == "neuron" and not node.cordoned]
    registered = [node for node in loadable if model in node.models and node.models[model].status == "unloaded"]
    if profile is None:
        if registered:
            return Cold(model, registered[0].name, _spec(snapshot, registered[0], model))
        raise _no_candidate_error(snapshot, healthy, model)
    candidates = [
        node for node in registered or loadable if feasible(profile, node) and _is_vacant(snapshot, node, model)
    ]
    trusted = [node for node in candidates if not _in_back_off(snapshot, node, model)]
    planned = [(node, _eviction_plan(snapshot, node, profile, since)) for node in trusted]
    plans = [(node, plan) for node, plan in planned if plan is not None]
    if not plans:
        raise _placement_error(snapshot, profile, healthy, candidates, trusted)
    plans = [(node, plan) for node, plan in plans if plan.fits] or plans
    ready_plans = [(node, plan) for node, plan in plans if plan.ready_at <= snapshot.now and node.name not in claimed]
    if ready_plans:
        node, plan = min(ready_plans, key=lambda pair: _preference(snapshot, *pair))
        return Cold(
            model, node.name, load_spec(profile, plan.devices), tuple(resident.model for resident in plan.evict)
        )
    node, plan = min(plans, key=lambda pair: (pair[1].ready_at, *_preference(snapshot, *pair)))
    return Hold(model, node.name, tuple(resident.model for resident in plan.evict), plan.ready_at)


def allowed(profile: Profile, node: Node) -> bool:
    """Return whether the catalogue allows the model on the node."""
    return not profile.pinned_on or node.name in profile.pinned_on


def fits(profile: Profile, discovery: Discovery) -> bool:
    """Return whether a node with the hardware `discovery` has enough suitable devices for the model.

    A model fits a node without accelerators if the catalogue requires one device and no minimum device memory.
    """
    if not discovery.devices:
        return profile.min_devices == 1 and not profile.min_device_vram_mb
    floor = profile.min_device_vram_mb or 0
    return sum(device.vram_total_mb >= floor for device in discovery.devices) >= profile.min_devices


def feasible(profile: Profile, node: Node) -> bool:
    """Return whether the model is allowed on the node and fits the node's known hardware."""
    return allowed(profile, node) and node.discovery is not None and fits(profile, node.discovery)


def load_spec(profile: Profile, devices: Collection[int]) -> ModelSpec:
    """Return the specification of a load for `POST /models/load`.

    Args:
        profile: the model's catalogue entry.
        devices: indices of the devices that the model is loaded on.
    """
    return ModelSpec(
        model_id=profile.id,
        harness=profile.harness,
        source=profile.full_source(),
        quant=profile.quant,
        tool_parser=profile.tool_parser,
        tensor_parallel=profile.min_devices if profile.min_devices > 1 else None,
        devices=[index for index in devices if index != HOST] or None,
    )


def _preference(snapshot: FleetSnapshot, node: Node, plan: EvictionPlan) -> tuple[bool, bool, float, int, str]:
    """Return the sort key of a plan; the plan with the lowest key is chosen.

    The criteria in order are: the model fits, nothing is evicted, lowest eviction cost, most free memory, node name.
    """
    free_mb = snapshot.free(node)
    return (
        not plan.fits,
        bool(plan.evict),
        plan.cost(snapshot.now),
        -sum(free_mb.get(device, 0) for device in plan.devices),
        node.name,
    )


def _running_load(snapshot: FleetSnapshot, healthy: list[Node], model: str) -> Cold | None:
    """Return the decision to join a running load of the model, or None if the model is not loading.

    The load was started by this gateway or is reported by a node.

    Raises:
        ApiError: 503 if the model is recovering, or if a model that is not in the catalogue is loading.
    """
    fleet_view = snapshot.view
    for node in healthy:
        if (node.name, model) in fleet_view.loading:
            return Cold(model, node.name, _spec(snapshot, node, model), joined=True)
    if any(node.models[model].status in RECOVERING for node in healthy if model in node.models):
        raise service_unavailable(f"model '{model}' is recovering", RETRY_RECOVERING)
    for node in healthy:
        if (model in node.models and node.models[model].status == "loading") or model in node.activating():
            if snapshot.catalogue.profile(model) is None:
                raise service_unavailable(f"model '{model}' is loading", RETRY_LOADING)
            if not _in_back_off(snapshot, node, model):
                return Cold(model, node.name, _spec(snapshot, node, model), joined=True)
    return None


def _eviction_plan(snapshot: FleetSnapshot, node: Node, profile: Profile, since: float) -> EvictionPlan | None:
    """Return the plan to fit the model on the node, or None if there is no such plan.

    If this node is draining the model, the plan's earliest start is infinity, because the model must first be unloaded.
    """
    plan = plan_eviction(snapshot, node, profile, since)
    is_draining = (node.name, profile.id) in snapshot.view.draining
    return replace(plan, ready_at=inf) if plan is not None and is_draining else plan


def _is_vacant(snapshot: FleetSnapshot, node: Node, model: str) -> bool:
    """Return whether the node may load the model: the model is unloaded, loading, or being drained there."""
    info = node.models.get(model)
    return info is None or info.status in ("unloaded", "loading") or (node.name, model) in snapshot.view.draining


def _in_back_off(snapshot: FleetSnapshot, node: Node, model: str) -> bool:
    failure = snapshot.failures.get((node.name, model))
    return failure is not None and failure.retry_at > snapshot.now


def _placement_error(
    snapshot: FleetSnapshot, profile: Profile, healthy: list[Node], candidates: list[Node], trusted: list[Node]
) -> ApiError:
    """Return the error response for requests for a catalogue model that cannot be placed now."""
    model = profile.id
    failures = [snapshot.failures[node.name, model] for node in candidates if node not in trusted]
    if failures:
        return failed(min(failures, key=lambda failure: (not failure.temporary, failure.retry_at)), snapshot.now)
    if trusted:
        return service_unavailable(
            f"no node has enough memory for model '{model}': {_memory_text(snapshot, profile)}", RETRY_NO_ROOM
        )
    return _no_candidate_error(snapshot, healthy, model)


def failed(failure: Failure, now: float) -> ApiError:
    """Return the error response for requests for a model whose last load failed."""
    if failure.temporary:
        return service_unavailable(failure.message, max(1, ceil(failure.retry_at - now)))
    return ApiError(503, "service_unavailable", failure.message, type="api_error")


def _memory_text(snapshot: FleetSnapshot, profile: Profile) -> str:
    devices = f" on {profile.min_devices} devices" if profile.min_devices > 1 else ""
    return f"it needs {snapshot.needs_mb(profile.id)} MB{devices}, and the loaded models cannot be evicted for it"


def _no_candidate_error(snapshot: FleetSnapshot, healthy: list[Node], model: str) -> ApiError:
    """Return the error response for requests for a model that no node can load now."""
    fleet_view, profile = snapshot.view, snapshot.catalogue.profile(model)
    for node in healthy:
        if model in node.models and not node.cordoned and not _is_vacant(snapshot, node, model):
            servable = node.models[model].servable
            reason = (servable.reason if servable else None) or "unknown reason"
            return service_unavailable(f"model '{model}' is loaded but cannot serve: {reason}", RETRY_UNSERVABLE)
    if profile is None:
        if fleet_view.knows(model):
            return service_unavailable(f"the node that has model '{model}' accepts no requests", RETRY_NODE_DOWN)
        return model_not_found(model[:200])
    if any(_may_hold_later(profile, node) for node in fleet_view.nodes if node.kind == "neuron"):
        return service_unavailable(f"no node that can hold model '{model}' accepts loads now", RETRY_NODE_DOWN)
    return ApiError(503, "service_unavailable", f"no node can hold model '{model}'", type="api_error")


def _may_hold_later(profile: Profile, node: Node) -> bool:
    """Return whether a node could hold the model later: it is down or cordoned, or its hardware is unknown."""
    if node.discovery is None:
        return allowed(profile, node)
    return (not node.healthy or node.cordoned) and feasible(profile, node)


def _spec(snapshot: FleetSnapshot, node: Node, model: str) -> ModelSpec:
    profile = snapshot.catalogue.profile(model)
    if profile is not None:
        devices = snapshot.devices.get((node.name, model)) or capable_devices(profile, node)[: profile.min_devices]
        return load_spec(profile, devices)
    info = node.models.get(model)
    return ModelSpec(model_id=model, harness=info.harness if info else "torch")
