"""Which node that has a model warm answers a request: a pure decision over the fleet's picture."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from helexa.cortex.fleet import FleetView, Node

WARM = ("loaded", "reloading")

Choose = Callable[[Sequence[Node]], Node]


@dataclass(frozen=True)
class Warm:
    """Forward to a node that has the model."""

    model: str
    node: str
    url: str


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
