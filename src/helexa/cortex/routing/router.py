"""Chooses the node for a request among the nodes that have the model loaded.

All functions are pure functions of a `FleetView`.
"""

import random
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import msgspec

from helexa.core.errors import ApiError, service_unavailable
from helexa.cortex.config import RoutingSection
from helexa.cortex.fleet.fleet_view import FleetView, Node
from helexa.cortex.routing.affinity import rank_nodes

WARM = ("loaded", "reloading")
RETRY_OPEN = 3

_LONGEST_NAME = 64

Choose = Callable[[Sequence[Node]], Node]

Outcome = Literal["unreached", "broken", "silent", "busy"]
"""How an attempt to forward a request failed before the first byte of a response.

`unreached`: the connection failed. `broken`: the connection ended, or the bytes were not HTTP. `silent`: a timeout
expired. `busy`: the node answered 429 or 503.
"""


class WarmRoute(msgspec.Struct, frozen=True):
    """Decision to forward a request to a node that has the model loaded.

    Attributes:
        model: the model id.
        node: the node's name.
        url: base URL of the model's API.
        reason: value of the header `x-helexa-route`: short ASCII text that explains the choice.
        kind: kind of the node: `neuron`, or `openai` for a third-party server.
    """

    model: str
    node: str
    url: str
    reason: str = ""
    kind: str = "neuron"


def route(
    view: FleetView,
    model: str,
    key: bytes | None = None,
    settings: RoutingSection | None = None,
    choose: Choose = random.choice,
    avoid: Collection[str] = (),
) -> WarmRoute | None:
    """Return the node for a request for `model`, or None if no node with the model accepts requests.

    The load of a node is its number of requests for the model. With an affinity key, the nodes are tried in the key's
    order of preference, and the first node with a low enough load is chosen. The load is low enough if it is at most
    the average load times `affinity_load_factor`, plus one. Without a key, the node with the lowest load is chosen.
    Nodes that failed or were busy recently are chosen only if no other node has the model.

    Args:
        view: state of the fleet.
        model: the model id.
        key: affinity key of the request from `affinity.affinity_key`, or None.
        settings: the routing section of the configuration.
        choose: chooses one of several nodes that have the same lowest number of requests.
        avoid: names of nodes that were already tried.
    """
    serving_nodes = candidates(view, model, avoid)
    preferred_nodes = [node for node in serving_nodes if (node.name, model) not in view.wary] or serving_nodes
    if not preferred_nodes:
        return None
    node, cause = _choose_node(view, preferred_nodes, model, key, settings or RoutingSection(), choose)
    load = view.load(node, model)
    reason = f"node={_ascii(node.name)}; why={cause}; load={load}; candidates={len(serving_nodes)}"
    return WarmRoute(model, node.name, node.url(model), reason, node.kind)


def candidates(view: FleetView, model: str, avoid: Collection[str] = ()) -> list[Node]:
    """Return the nodes that may get a request for `model` now, except the nodes named in `avoid`.

    Such a node has the model loaded, is not cordoned, is not about to unload the model, and has no open circuit breaker
    for it.
    """
    return [
        node
        for node in view.nodes
        if has_warm(node, model)
        and not node.cordoned
        and node.name not in avoid
        and (node.name, model) not in view.draining
        and (node.name, model) not in view.open
    ]


def has_warm(node: Node, model: str) -> bool:
    """Return whether a node is up, has the model loaded, and can serve requests for the model."""
    if not node.healthy:
        return False
    info = node.models.get(model)
    return info is not None and info.status in WARM and (info.servable is None or info.servable.ok)


def breaker_error(view: FleetView, model: str) -> ApiError | None:
    """Return a 503 error if a node has the model loaded but gets no requests because of an open circuit breaker.

    Return None if there is no such node. The caller uses this function if `route` has found no node. With an open
    breaker, the gateway does not load the model on another node, because a load takes longer than waiting for the
    breaker's next probe request.
    """
    if any((node.name, model) in view.open and has_warm(node, model) and not node.cordoned for node in view.nodes):
        return service_unavailable(f"requests for model '{model}' keep failing on every node that has it", RETRY_OPEN)
    return None


def may_retry(outcomes: Sequence[Outcome]) -> bool:
    """Return whether the request may be sent to another node after the failed attempts `outcomes`.

    The result depends on how the last attempt failed:

    * `unreached`, `busy`: True, because the node has not processed the request.
    * `broken`: True after the first such failure, False after the second. The request may crash nodes, so it must not
      reach a third node.
    * `silent`: False, because the node may still be working on the request.
    """
    last_outcome = outcomes[-1]
    return last_outcome in ("unreached", "busy") or (last_outcome == "broken" and outcomes.count("broken") == 1)


def _choose_node(
    view: FleetView, nodes: list[Node], model: str, key: bytes | None, settings: RoutingSection, choose: Choose
) -> tuple[Node, str]:
    if len(nodes) == 1:
        return nodes[0], "only"
    loads = {node.name: view.load(node, model) for node in nodes}
    if key is not None and settings.affinity:
        affinity_bound = settings.affinity_load_factor * sum(loads.values()) / len(loads) + 1
        ranking = rank_nodes(loads, model, key)
        # the lowest load is always within the bound
        name = next(name for name in ranking if loads[name] <= affinity_bound)
        node = next(node for node in nodes if node.name == name)
        return node, "affinity" if name == ranking[0] else "overflow"
    least_load = min(loads.values())
    return choose([node for node in nodes if loads[node.name] == least_load]), "least-busy"


def _ascii(name: str) -> str:
    if name.isascii() and name.isprintable() and ";" not in name:
        return name[:_LONGEST_NAME]
    return "".join(char if char.isascii() and char.isprintable() and char != ";" else "?" for char in name)[
        :_LONGEST_NAME
    ]
