"""Which node answers a request: a pure decision over the fleet's picture and the catalogue."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from helexa.core.catalogue import Catalogue, Profile
from helexa.core.errors import ApiError, model_not_found, service_unavailable
from helexa.core.fleet import ModelSpec
from helexa.cortex import placement
from helexa.cortex.fleet import FleetView, Node

WARM = ("loaded", "reloading")
RECOVERING = ("recovering", "poisoned")

RETRY_NO_NODE = 5
RETRY_RECOVERING = 2
RETRY_NODE_DOWN = 3
RETRY_LOADING = 5
RETRY_UNSERVABLE = 5

Choose = Callable[[Sequence[Node]], Node]


@dataclass(frozen=True)
class Warm:
    """Forward to a node that has the model."""

    model: str
    node: str
    url: str


@dataclass(frozen=True)
class Cold:
    """Load the model on a node first (or join the load that runs there), then forward."""

    model: str
    node: str
    spec: ModelSpec


Decision = Warm | Cold


def decide(view: FleetView, catalogue: Catalogue, name: str, choose: Choose = random.choice) -> Decision:
    """Where a request for `name` (a model id or an alias) goes. `choose` breaks ties.

    Raises:
        ApiError: nobody can serve it now (503, with Retry-After when that may change) or ever heard of it (404).
    """
    model = catalogue.resolve(name)
    healthy = [node for node in view.nodes if node.healthy]
    if not healthy:
        raise service_unavailable("no healthy node", RETRY_NO_NODE)
    return (
        warm(view, model, choose=choose)
        or _running_load(view, catalogue, healthy, model)
        or _listed(catalogue, healthy, model)
        or _cold(view, catalogue, healthy, model)
    )


def warm(view: FleetView, model: str, avoid: Collection[str] = (), choose: Choose = random.choice) -> Warm | None:
    """The least busy healthy node that has `model` loaded and servable, leaving out those in `avoid`."""
    nodes = [node for node in view.nodes if node.healthy and node.name not in avoid and _serves(node, model)]
    if not nodes:
        return None
    least = min(view.load(node, model) for node in nodes)
    node = choose([node for node in nodes if view.load(node, model) == least])
    return Warm(model, node.name, node.url(model))


def _serves(node: Node, model: str) -> bool:
    info = node.models.get(model)
    return info is not None and info.status in WARM and (info.servable is None or info.servable.ok)


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
        node = placement.best(profile, free)
        if node is not None:
            return Cold(model, node.name, _spec(catalogue, node, model))
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
        return placement.allowed(profile, node)
    return not node.healthy and placement.feasible(profile, node)


def _spec(catalogue: Catalogue, node: Node, model: str) -> ModelSpec:
    profile = catalogue.profile(model)
    if profile is not None and node.discovery is not None:
        return placement.load_spec(profile, node.discovery)
    info = node.models.get(model)
    return ModelSpec(model_id=model, harness=info.harness if info else "torch")
