"""Read-only records of the nodes' state, which are the input of routing and placement decisions."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from helexa.core.fleet import Discovery, Health, ModelInfo
from helexa.cortex.fleet.breaker import Pair


@dataclass(frozen=True)
class Node:
    """State of one node.

    Attributes:
        name: configured name.
        endpoint: configured base URL.
        kind: `neuron`, or `openai` for a third-party server with an OpenAI-compatible API.
        cordoned: True if the node gets no new requests and loads.
        allowed_hosts: hosts that may serve the node's models besides the host of `endpoint`.
        healthy: False before the first successful poll, and after three consecutive failed polls.
        misses: number of failed polls since the last successful poll.
        problem: why the last poll failed; None if it succeeded, and before the first poll.
        discovery: last reported hardware; None before the first report.
        health: last reported health, with running requests and free memory; None before the first report.
        models: last reported models, by id; kept while the node is down.
        urls: base URL of each model's API, by model id. The default for other models is `endpoint`.
        other_requests: number of running and queued requests of other clients at the last poll, by model id.
        read_at: when the poll that reported `health` began (`time.monotonic`).
    """

    name: str
    endpoint: str
    kind: str = "neuron"
    cordoned: bool = False
    allowed_hosts: frozenset[str] = frozenset()
    healthy: bool = False
    misses: int = 0
    problem: str | None = None
    discovery: Discovery | None = None
    health: Health | None = None
    models: Mapping[str, ModelInfo] = field(default_factory=dict[str, ModelInfo])
    urls: Mapping[str, str] = field(default_factory=dict[str, str])
    other_requests: Mapping[str, int] = field(default_factory=dict[str, int])
    read_at: float | None = None

    def url(self, model: str) -> str:
        """Return the base URL of the API that serves `model` on this node."""
        return self.urls.get(model, self.endpoint)

    def activating(self) -> list[str]:
        """Return the ids of the models that the node is loading or has queued for loading."""
        if self.health is None:
            return []
        activation = self.health.activation
        return [*([activation.in_progress] if activation.in_progress else []), *activation.pending]


@dataclass(frozen=True)
class FleetView:
    """State of all nodes, as input of one routing or placement decision.

    The mappings `in_flight`, `loaded_at` and `used_at` are live: other tasks may change them at every `await`. Code
    that makes a decision must therefore not await between two reads. The keys "by (node, model)" are pairs (node name,
    model id).

    Attributes:
        nodes: the nodes in configured order.
        in_flight: number of running requests of this gateway, by (node, model).
        loading: (node, model) pairs that this gateway is loading.
        draining: (node, model) pairs that get no new requests because the model will be unloaded.
        loaded_at: when a model was loaded (`time.monotonic`), by (node, model). Loads before the gateway's
            first poll of the node are missing.
        used_at: when a node last had a request for the model (`time.monotonic`), by (node, model).
        open: (node, model) pairs with an open circuit breaker, which get no requests.
        wary: (node, model) pairs that failed or were busy recently; they get requests only if no other node can serve.
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
        """Return the node that stores the API response with the id `response`, or None if no node does.

        Each node reports the prefix of its response ids.
        """
        for node in self.nodes:
            prefix = node.health.responses if node.health is not None else None
            if prefix and response.startswith(prefix):
                return node
        return None

    def load(self, node: Node, model: str) -> int:
        """Return the number of requests for `model` on `node`.

        The number includes this gateway's running requests, and other clients' requests at the last poll.
        """
        return self.in_flight.get((node.name, model), 0) + node.other_requests.get(model, 0)

    def running(self, name: str) -> dict[str, int]:
        """Return the number of this gateway's running requests on a node, by model."""
        return {model: count for (node, model), count in self.in_flight.items() if node == name}

    def knows(self, model: str) -> bool:
        """Return whether any node lists the model, or reports that it is loading the model."""
        return any(model in node.models or model in node.activating() for node in self.nodes)


@dataclass(frozen=True)
class Report:
    """Result of one successful poll of a node.

    Attributes:
        models: the node's models, by id.
        health: running requests and free memory; None if they were not requested or the request failed.
        discovery: the node's hardware; None if it was not requested or the request failed.
        urls: base URL of each model's API, by model id, as far as known.
    """

    models: Mapping[str, ModelInfo]
    health: Health | None = None
    discovery: Discovery | None = None
    urls: Mapping[str, str] = field(default_factory=dict[str, str])
