"""Which node that has a model warm answers a request: a pure decision over the fleet's picture."""

import random
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import msgspec

from helexa.core.errors import ApiError, service_unavailable
from helexa.cortex.config import RoutingSection
from helexa.cortex.fleet.picture import FleetView, Node
from helexa.cortex.routing.affinity import ranked

WARM = ("loaded", "reloading")
RETRY_OPEN = 3

_LONGEST_NAME = 64

Choose = Callable[[Sequence[Node]], Node]

Outcome = Literal["unreached", "broken", "silent", "busy"]
"""How an attempt failed before the first byte of an answer: no connection; a connection that ended or did not speak
HTTP; a connection that said nothing for too long; a 429 or 503."""


class Warm(msgspec.Struct, frozen=True):
    """Forward to a node that has the model.

    Attributes:
        reason: why this node, for the header `x-helexa-route`: ASCII, bounded.
        kind: of the node.
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
) -> Warm | None:
    """The node that answers a request for `model`; None when none that has it warm may be asked.

    Load is a veto, affinity a preference: the first node in the key's order whose load is within
    `affinity_load_factor` times the average, plus one; without a key the least busy. Nodes that failed or were busy a
    moment ago are asked only when there is no other.

    Args:
        key: names the session, `affinity.affinity_key`.
        choose: breaks ties between the least busy.
        avoid: names of nodes that have been tried already.
    """
    able = candidates(view, model, avoid)
    calm = [node for node in able if (node.name, model) not in view.wary] or able
    if not calm:
        return None
    node, why = _chosen(view, calm, model, key, settings or RoutingSection(), choose)
    load = view.load(node, model)
    reason = f"node={_ascii(node.name)}; why={why}; load={load}; candidates={len(able)}"
    return Warm(model, node.name, node.url(model), reason, node.kind)


def candidates(view: FleetView, model: str, avoid: Collection[str] = ()) -> list[Node]:
    """The nodes that may be asked for `model` now."""
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
    """Whether a node is up and has the model loaded and servable."""
    if not node.healthy:
        return False
    info = node.models.get(model)
    return info is not None and info.status in WARM and (info.servable is None or info.servable.ok)


def failing(view: FleetView, model: str) -> ApiError | None:
    """The refusal when a model is warm, but only where requests keep failing: a load elsewhere would cost more than
    the moment until it is tried again."""
    if any((node.name, model) in view.open and has_warm(node, model) and not node.cordoned for node in view.nodes):
        return service_unavailable(f"requests for model '{model}' keep failing on every node that has it", RETRY_OPEN)
    return None


def may_retry(outcomes: Sequence[Outcome]) -> bool:
    """Whether another node may be asked after these failed attempts, the last of them just now.

    A node that was never reached has seen nothing of the request; a busy one has refused it. One that broke off may
    have died of it, so a second node is given it, but no third. One that is silent may still be at work on it.
    """
    last = outcomes[-1]
    return last in ("unreached", "busy") or (last == "broken" and outcomes.count("broken") == 1)


def _chosen(
    view: FleetView, nodes: list[Node], model: str, key: bytes | None, settings: RoutingSection, choose: Choose
) -> tuple[Node, str]:
    if len(nodes) == 1:
        return nodes[0], "only"
    loads = {node.name: view.load(node, model) for node in nodes}
    if key is not None and settings.affinity:
        bound = settings.affinity_load_factor * sum(loads.values()) / len(loads) + 1
        order = ranked(loads, model, key)
        name = next(name for name in order if loads[name] <= bound)  # the least busy is within it at the latest
        node = next(node for node in nodes if node.name == name)
        return node, "affinity" if name == order[0] else "overflow"
    least = min(loads.values())
    return choose([node for node in nodes if loads[node.name] == least]), "least-busy"


def _ascii(name: str) -> str:
    if name.isascii() and name.isprintable() and ";" not in name:
        return name[:_LONGEST_NAME]
    return "".join(char if char.isascii() and char.isprintable() and char != ";" else "?" for char in name)[
        :_LONGEST_NAME
    ]
