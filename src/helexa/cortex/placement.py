"""Where a model that is not warm is to be loaded: pure functions over profiles, nodes and the fleet's picture."""

from collections.abc import Iterable
from dataclasses import dataclass

from helexa.core.catalogue import Catalogue, Profile
from helexa.core.errors import ApiError, model_not_found, service_unavailable
from helexa.core.fleet import Discovery, ModelSpec
from helexa.cortex.fleet import FleetView, Node

RECOVERING = ("recovering", "poisoned")

RETRY_NO_NODE = 5
RETRY_RECOVERING = 2
RETRY_NODE_DOWN = 3
RETRY_LOADING = 5
RETRY_UNSERVABLE = 5


@dataclass(frozen=True)
class Cold:
    """Load the model on a node first (or join the load that runs there), then forward."""

    model: str
    node: str
    spec: ModelSpec


def cold(view: FleetView, catalogue: Catalogue, model: str) -> Cold:
    """Where to load `model`, which no healthy node has warm.

    Raises:
        ApiError: nobody can serve it now (503, with Retry-After when that may change) or ever heard of it (404).
    """
    healthy = [node for node in view.nodes if node.healthy]
    if not healthy:
        raise service_unavailable("no healthy node", RETRY_NO_NODE)
    return (
        _running_load(view, catalogue, healthy, model)
        or _listed(catalogue, healthy, model)
        or _cold(view, catalogue, healthy, model)
    )


def allowed(profile: Profile, node: Node) -> bool:
    """Whether the operator lets the model run there."""
    return not profile.pinned_on or node.name in profile.pinned_on


def fits(profile: Profile, discovery: Discovery) -> bool:
    """Whether the hardware could ever hold the model. A node without accelerators holds what states no floor."""
    if not discovery.devices:
        return profile.min_devices == 1 and not profile.min_device_vram_mb
    return len(_capable_devices(profile, discovery)) >= profile.min_devices


def feasible(profile: Profile, node: Node) -> bool:
    """Whether the model may and can run on a node whose hardware is known."""
    return allowed(profile, node) and node.discovery is not None and fits(profile, node.discovery)


def best(profile: Profile, nodes: Iterable[Node]) -> Node | None:
    """The node to load the model on: one with room first, then the one with most free memory, then by name."""

    def rank(node: Node) -> tuple[bool, int, str]:
        free = _free_vram_mb(node, profile.min_devices)
        room = free
        if node.discovery is not None and not node.discovery.devices:
            room = node.discovery.memory_total_mb
        return room < (profile.vram_mb or 0), -free, node.name

    return min((node for node in nodes if feasible(profile, node)), key=rank, default=None)


def load_spec(profile: Profile, discovery: Discovery) -> ModelSpec:
    """What to ask of a node with this hardware."""
    devices = _capable_devices(profile, discovery)[: profile.min_devices]
    return ModelSpec(
        model_id=profile.id,
        harness=profile.harness,
        source=profile.full_source(),
        quant=profile.quant,
        tensor_parallel=profile.min_devices if profile.min_devices > 1 else None,
        devices=devices or None,
    )


def _capable_devices(profile: Profile, discovery: Discovery) -> list[int]:
    floor = profile.min_device_vram_mb or 0
    return [device.index for device in discovery.devices if device.vram_total_mb >= floor]


def _free_vram_mb(node: Node, devices: int) -> int:
    if node.health is not None and node.health.devices:
        free = [device.vram_free_mb for device in node.health.devices]
    else:
        free = [device.vram_total_mb for device in node.discovery.devices] if node.discovery else []
    return sum(sorted(free, reverse=True)[:devices])


def _running_load(view: FleetView, catalogue: Catalogue, nodes: list[Node], model: str) -> Cold | None:
    for node in nodes:
        if (node.name, model) in view.loading:
            return Cold(model, node.name, _spec(catalogue, node, model))
    return None


def _listed(catalogue: Catalogue, nodes: list[Node], model: str) -> Cold | None:
    """What a node's own word on a model that is not warm means."""
    status = {node.name: node.models[model].status for node in nodes if model in node.models}
    if any(state in RECOVERING for state in status.values()):
        raise service_unavailable(f"model '{model}' is recovering", RETRY_RECOVERING)
    for node in nodes:
        if status.get(node.name) == "loading" or model in node.activating():
            if catalogue.profile(model) is None:
                raise service_unavailable(f"model '{model}' is loading", RETRY_LOADING)
            return Cold(model, node.name, _spec(catalogue, node, model))
    for node in nodes:
        if status.get(node.name) == "unloaded":
            return Cold(model, node.name, _spec(catalogue, node, model))
    return None


def _cold(view: FleetView, catalogue: Catalogue, healthy: list[Node], model: str) -> Cold:
    profile = catalogue.profile(model)
    unservable = [node for node in healthy if model in node.models]
    if profile is not None:
        free = [node for node in healthy if node not in unservable]
        chosen = best(profile, free)
        if chosen is not None:
            return Cold(model, chosen.name, _spec(catalogue, chosen, model))
    for node in unservable:
        servable = node.models[model].servable
        reason = (servable.reason if servable else None) or "unknown reason"
        raise service_unavailable(f"model '{model}' is loaded but cannot serve: {reason}", RETRY_UNSERVABLE)
    if profile is None:
        if view.knows(model):
            raise service_unavailable(f"the node that has model '{model}' is down", RETRY_NODE_DOWN)
        raise model_not_found(model[:200])
    if any(_may_hold_later(profile, node) for node in view.nodes):
        raise service_unavailable(f"no node that can hold model '{model}' is up", RETRY_NODE_DOWN)
    raise ApiError(503, "service_unavailable", f"no node can hold model '{model}'", type="api_error")


def _may_hold_later(profile: Profile, node: Node) -> bool:
    """Whether a node that is down, or has not told its hardware yet, could hold the model."""
    if node.discovery is None:
        return allowed(profile, node)
    return not node.healthy and feasible(profile, node)


def _spec(catalogue: Catalogue, node: Node, model: str) -> ModelSpec:
    profile = catalogue.profile(model)
    if profile is not None and node.discovery is not None:
        return load_spec(profile, node.discovery)
    info = node.models.get(model)
    return ModelSpec(model_id=model, harness=info.harness if info else "torch")
