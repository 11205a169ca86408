"""What is known of the fleet, as immutable records: all decisions are made on these."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from helexa.core.fleet import Discovery, Health, ModelInfo
from helexa.cortex.fleet.breaker import Pair


@dataclass(frozen=True)
class Node:
    """What is known of one node.

    Attributes:
        endpoint: configured base URL.
        kind: `neuron`, or `openai` for a server that can say and do less.
        cordoned: takes nothing new: no request, no load.
        allowed_hosts: hosts besides the endpoint's that may serve the node's models.
        healthy: answered lately; False until the first answer and after three misses in a row.
        misses: polls failed since the last answer.
        models: last reported models, by id; they stay listed while the node is down.
        urls: base URL of each model's API, where the node said one.
        others: requests per model that the node had at the last poll and that did not come through this gateway.
        read_at: when the poll that brought `health` began (`time.monotonic`).
    """

    name: str
    endpoint: str
    kind: str = "neuron"
    cordoned: bool = False
    allowed_hosts: frozenset[str] = frozenset()
    healthy: bool = False
    misses: int = 0
    discovery: Discovery | None = None
    health: Health | None = None
    models: Mapping[str, ModelInfo] = field(default_factory=dict[str, ModelInfo])
    urls: Mapping[str, str] = field(default_factory=dict[str, str])
    others: Mapping[str, int] = field(default_factory=dict[str, int])
    read_at: float | None = None

    def url(self, model: str) -> str:
        """Base URL to send requests for `model` to."""
        return self.urls.get(model, self.endpoint)

    def activating(self) -> list[str]:
        """Models that the node is loading, or about to, by itself."""
        if self.health is None:
            return []
        activation = self.health.activation
        return [*([activation.in_progress] if activation.in_progress else []), *activation.pending]


@dataclass(frozen=True)
class FleetView:
    """The fleet at one moment, in configured order. Counts and times are live: decide on them at once.

    Attributes:
        in_flight: requests now running through this gateway, by (node, model).
        loading: loads now running for this gateway, as (node, model).
        draining: (node, model) that take no new requests, because the model is about to be unloaded there.
        loaded_at: when a model came to be on a node (`time.monotonic`), by (node, model), if it was seen to come.
        used_at: when a model last had a request on a node (`time.monotonic`), by (node, model).
        open: (node, model) that failed so often that they are not asked for now.
        wary: (node, model) that failed or were busy a moment ago: asked only when no other can be.
    """

    nodes: tuple[Node, ...]
    in_flight: Mapping[Pair, int] = field(default_factory=dict[Pair, int])
    loading: frozenset[Pair] = frozenset()
    draining: frozenset[Pair] = frozenset()
    loaded_at: Mapping[Pair, float] = field(default_factory=dict[Pair, float])
    used_at: Mapping[Pair, float] = field(default_factory=dict[Pair, float])
    open: frozenset[Pair] = frozenset()
    wary: frozenset[Pair] = frozenset()

    def holder(self, response: str) -> Node | None:
        """The node that keeps a response, by its id, if it is one of these."""
        for node in self.nodes:
            prefix = node.health.responses if node.health is not None else None
            if prefix and response.startswith(prefix):
                return node
        return None

    def load(self, node: Node, model: str) -> int:
        """How busy `model` is on `node`: requests through this gateway now, and others at the last poll."""
        return self.in_flight.get((node.name, model), 0) + node.others.get(model, 0)

    def running(self, name: str) -> dict[str, int]:
        """Requests now running on a node through this gateway, by model."""
        return {model: count for (node, model), count in self.in_flight.items() if node == name}

    def knows(self, model: str) -> bool:
        """Whether any node has reported `model`."""
        return any(model in node.models or model in node.activating() for node in self.nodes)


@dataclass(frozen=True)
class Report:
    """What one successful poll brought; None means not asked or not answered this time."""

    models: Mapping[str, ModelInfo]
    health: Health | None = None
    discovery: Discovery | None = None
    urls: Mapping[str, str] = field(default_factory=dict[str, str])
