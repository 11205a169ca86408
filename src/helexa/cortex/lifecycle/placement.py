"""Chooses node, devices and evictions for a model that is not loaded.

All functions are pure functions of a `FleetSnapshot`.
"""

from collections.abc import Collection, Set
from dataclasses import dataclass, replace
from math import ceil, inf

from helexa.core.catalog import PINNED_RESIDENCY, Profile
from helexa.core.display import memory_text
from helexa.core.errors import ApiError, service_unavailable
from helexa.core.node_reports import ModelSpec
from helexa.cortex.fleet.fleet_view import Node, is_sleeping
from helexa.cortex.lifecycle.evictor import EvictionPlan, plan_eviction, preference
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot
from helexa.cortex.lifecycle.load_history import Failure
from helexa.cortex.lifecycle.memory import HOST, device_pools, misfit
from helexa.cortex.routing import unknown_model

RECOVERING = ("recovering", "poisoned")

RETRY_NO_NODE = 5
RETRY_RECOVERING = 2
RETRY_NODE_DOWN = 3
RETRY_LOADING = 5
RETRY_UNSERVABLE = 5
RETRY_NO_ROOM = 30

_MAX_REASONS = 3  # maximum number of reasons in an error message


@dataclass(frozen=True)
class ColdPlacement:
    """Decision to load a model on a node, or to join its running load there."""

    model: str
    node: str
    spec: ModelSpec  # the parameters of the load request to the node
    evict: tuple[str, ...] = ()  # ids of the models to evict before the load
    joined: bool = False  # True if the load is already running


@dataclass(frozen=True)
class DelayedPlacement:
    """Decision to wait, because the models to evict are in use or too new."""

    model: str
    node: str  # name of the node that the model will probably be loaded on
    evict: tuple[str, ...]  # ids of the models that will probably be evicted before the load
    # Time from which all models in `evict` may be evicted, even if requests still use them (monotonic seconds). If the
    # models become idle, they may be evicted earlier. Infinity if another load must end first.
    until: float


def place(
    snapshot: FleetSnapshot,
    model: str,
    since: float = inf,
    claimed: Collection[str] = (),
    prompts: Set[str] = frozenset(),
) -> ColdPlacement | DelayedPlacement:
    """Choose the node that loads a model, or decide that the load must wait.

    Args:
        since: arrival time of the oldest waiting request (monotonic seconds).
        claimed: names of nodes that are reserved for other models, which have waited longer than `swap_wait_secs`.
        prompts: names of the waiting requests' prompts (see `routing.prefix_name`). Among nodes that need no eviction,
            the node that has saved the largest number of these prompts is preferred.

    Raises:
        ApiError: 404 for an unknown model, if all nodes have reported their models; 503 if no node can load the model,
            with Retry-After if a retry may succeed.
    """
    healthy = [node for node in snapshot.view.nodes if node.healthy]
    if not healthy:
        raise service_unavailable("no healthy node; `helexa status` shows why", RETRY_NO_NODE)
    running_target = _running_load(snapshot, healthy, model)
    if running_target is not None:
        return running_target
    profile = snapshot.profile(model)
    loadable = [node for node in healthy if node.kind == "neuron" and not node.cordoned]
    registered = [node for node in loadable if model in node.models and node.models[model].status == "unloaded"]
    if profile is None:
        if registered:
            return ColdPlacement(model, registered[0].name, _spec(snapshot, registered[0], model))
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
        node, plan = min(ready_plans, key=lambda pair: _preference(snapshot, *pair, model, prompts))
        return ColdPlacement(
            model,
            node.name,
            spec_on(snapshot, node, profile, plan.devices),
            tuple(resident.model for resident in plan.evict),
        )
    node, plan = min(plans, key=lambda pair: (pair[1].ready_at, *_preference(snapshot, *pair, model, prompts)))
    return DelayedPlacement(model, node.name, tuple(resident.model for resident in plan.evict), plan.ready_at)


def allowed(profile: Profile, node: Node) -> bool:
    """Return whether the catalog (`pinned_on`) allows a model's placement on a node."""
    return not profile.pinned_on or node.name in profile.pinned_on


def feasible(profile: Profile, node: Node) -> bool:
    """Return whether a placement is allowed on a node and known to fit its hardware."""
    return allowed(profile, node) and node.discovery is not None and misfit(profile, node.discovery) is None


def load_spec(profile: Profile, devices: Collection[int]) -> ModelSpec:
    """Return the body of `POST /models/load` for a placement on a node."""
    return ModelSpec(
        model_id=profile.id,
        harness=profile.harness,
        source=profile.full_source(),
        quant=profile.quant,
        tool_parser=profile.tool_parser,
        draft_model=profile.draft_model,
        sampling=profile.sampling,
        tensor_parallel=profile.min_devices if profile.min_devices > 1 else None,
        devices=[index for index in devices if index != HOST] or None,
        idle_unload_secs=_idle_unload_secs(profile),
    )


def _idle_unload_secs(profile: Profile) -> float | None:
    """Return the idle time in seconds after which a node puts the model to sleep.

    0 means never. None means the node's own setting.
    """
    is_pinned = (profile.residency_priority or 0) >= PINNED_RESIDENCY
    return 0.0 if profile.idle_unload_secs is None and is_pinned else profile.idle_unload_secs


def _preference(
    snapshot: FleetSnapshot, node: Node, plan: EvictionPlan, model: str, prompts: Set[str]
) -> tuple[bool, bool, int, bool, float, int, str]:
    """Return the sort key of a node's eviction plan. The node's name breaks ties."""
    unfit, evicts, cost, used = preference(snapshot, node, plan)
    # A saved prompt counts more than a sleeping model, because reading a long prompt from disk saves more time than
    # waking a model instead of loading it.
    saved = len(prompts & snapshot.saved_prompts.get((node.name, model), frozenset()))
    return unfit, evicts, -saved, not is_sleeping(node, model), cost, used, node.name


def _running_load(snapshot: FleetSnapshot, healthy: list[Node], model: str) -> ColdPlacement | None:
    """Return the decision to wait for a running load of the model; None if none runs.

    The load was started by this gateway, or is reported by one of the `healthy` nodes. A reported load on a node that
    must not load the model yet, because the last load there failed, is ignored.

    Raises:
        ApiError: 503 if the model is recovering, or if a model without a profile is loading.
    """
    fleet_view = snapshot.view
    for node in healthy:
        if (node.name, model) in fleet_view.loading:
            return ColdPlacement(model, node.name, _spec(snapshot, node, model), joined=True)
    if any(node.models[model].status in RECOVERING for node in healthy if model in node.models):
        message = f"model '{model}' is recovering; retry in {RETRY_RECOVERING} s"
        raise service_unavailable(message, RETRY_RECOVERING)
    for node in healthy:
        if (model in node.models and node.models[model].status == "loading") or model in node.activating():
            if snapshot.profile(model) is None:
                raise service_unavailable(f"model '{model}' is loading; retry in {RETRY_LOADING} s", RETRY_LOADING)
            if not _in_back_off(snapshot, node, model):
                return ColdPlacement(model, node.name, _spec(snapshot, node, model), joined=True)
    return None


def _eviction_plan(snapshot: FleetSnapshot, node: Node, profile: Profile, since: float) -> EvictionPlan | None:
    """Return the plan to load the model on the node, or None if there is none."""
    # If the model is about to be unloaded from this node, the plan's `ready_at` is infinity, because the unload must
    # end before the load can start.
    plan = plan_eviction(snapshot, node, profile, since)
    is_draining = (node.name, profile.id) in snapshot.view.draining
    return replace(plan, ready_at=inf) if plan is not None and is_draining else plan


def _is_vacant(snapshot: FleetSnapshot, node: Node, model: str) -> bool:
    """Return whether the model is absent, loading, asleep or draining on the node."""
    info = node.models.get(model)
    return (
        info is None
        or info.status in ("unloaded", "loading", "sleeping")
        or (node.name, model) in snapshot.view.draining
    )


def _in_back_off(snapshot: FleetSnapshot, node: Node, model: str) -> bool:
    failure = snapshot.failures.get((node.name, model))
    return failure is not None and failure.retry_at > snapshot.now


def _placement_error(
    snapshot: FleetSnapshot, profile: Profile, healthy: list[Node], candidates: list[Node], trusted: list[Node]
) -> ApiError:
    """Return the 503 error for a catalog model that no node can load now.

    Args:
        trusted: the candidates on which the last load of the model has not failed recently.
    """
    model = profile.id
    failures = [snapshot.failures[node.name, model] for node in candidates if node not in trusted]
    if failures:
        return failed(min(failures, key=lambda failure: (not failure.temporary, failure.retry_at)), snapshot.now)
    if trusted:
        return service_unavailable(
            f"no node has enough memory for model '{model}': {_memory_text(snapshot, profile, trusted)}", RETRY_NO_ROOM
        )
    return _no_candidate_error(snapshot, healthy, model)


def failed(failure: Failure, now: float) -> ApiError:
    """Return the 503 error for a failed load, with Retry-After if it is temporary."""
    if failure.temporary:
        return service_unavailable(failure.message, max(1, ceil(failure.retry_at - now)))
    return ApiError(503, "service_unavailable", failure.message, type="api_error")


def _memory_text(snapshot: FleetSnapshot, profile: Profile, nodes: list[Node]) -> str:
    devices = f" on {profile.min_devices} devices" if profile.min_devices > 1 else ""
    text = f"the model needs {memory_text(snapshot.needs_mb(profile.id))}{devices}"
    empty = [node for node in nodes if not snapshot.residents(node)]
    if len(empty) < len(nodes):
        return f"{text}, and the loaded models cannot be evicted for this model"
    free = [f"{node.name} has {memory_text(max(snapshot.free(node).values(), default=0))} free" for node in empty]
    return f"{text}; {', '.join(free[:_MAX_REASONS])}"


def _no_candidate_error(snapshot: FleetSnapshot, healthy: list[Node], model: str) -> ApiError:
    """Return the error for a model that no healthy node may load."""
    fleet_view, profile = snapshot.view, snapshot.profile(model)
    for node in healthy:
        if model in node.models and not node.cordoned and not _is_vacant(snapshot, node, model):
            servable = node.models[model].servable
            reason = (servable.reason if servable else None) or "unknown reason"
            return service_unavailable(
                f"model '{model}' is loaded but cannot serve: {reason}; see the log of node '{node.name}'",
                RETRY_UNSERVABLE,
            )
    if profile is None:
        if fleet_view.knows(model):
            return service_unavailable(
                f"the node that has model '{model}' accepts no requests; start or uncordon it", RETRY_NODE_DOWN
            )
        return unknown_model(fleet_view, model)
    if any(_may_hold_later(profile, node) for node in fleet_view.nodes if node.kind == "neuron"):
        return service_unavailable(
            f"no node that can hold model '{model}' accepts loads now; start or uncordon one", RETRY_NODE_DOWN
        )
    message = f"no node can hold model '{model}'"
    reasons = [misfit(profile, node.discovery) for node in healthy if node.discovery and allowed(profile, node)]
    if reasons := list(dict.fromkeys(filter(None, reasons)))[:_MAX_REASONS]:
        message += f": it {', it '.join(reasons)}"
    return ApiError(503, "service_unavailable", message, type="api_error")


def _may_hold_later(profile: Profile, node: Node) -> bool:
    """Return whether the node may be able to load the model later.

    This is the case for a suitable node that is down or cordoned, and for an allowed node with unknown hardware.
    """
    if node.discovery is None:
        return allowed(profile, node)
    return (not node.healthy or node.cordoned) and feasible(profile, node)


def _spec(snapshot: FleetSnapshot, node: Node, model: str) -> ModelSpec:
    profile = snapshot.profile(model)
    if profile is not None:
        devices = snapshot.devices.get((node.name, model)) or _first_devices(profile, node)
        return spec_on(snapshot, node, profile, devices)
    info = node.models.get(model)
    return ModelSpec(model_id=model, harness=info.harness if info else "torch")


def spec_on(snapshot: FleetSnapshot, node: Node, profile: Profile, devices: Collection[int]) -> ModelSpec:
    """Return the body of the load request for a placement on a node.

    If the model is not in the catalog, the body names the files that the node has listed on its disk.
    """
    spec = load_spec(profile, devices)
    local = snapshot.view.local_model(node, profile.id)
    if local is None or snapshot.catalog.profile(profile.id) is not None:
        return spec
    # With `download` set to False, the load needs no network, and uses exactly the files that the node has listed.
    return spec.model_copy(update={"source": local.source, "download": False})


def _first_devices(profile: Profile, node: Node) -> tuple[int, ...]:
    pools = device_pools(profile, node.discovery) if node.discovery is not None else []
    return pools[0].devices[: pools[0].count] if pools else ()
