"""The gateway's picture of its nodes. `Fleet` alone changes it; everybody else reads an immutable `FleetView`."""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf

from helexa.core.fleet import Discovery, Health, ModelInfo

log = logging.getLogger(__name__)

MISSES_TO_DOWN = 3


@dataclass(frozen=True)
class Node:
    """What is known of one node.

    Attributes:
        endpoint: configured base URL.
        kind: `neuron`, or `openai` for a server that can say and do less.
        cordoned: takes nothing new: no request, no load.
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
    """The fleet at one moment, in configured order.

    Attributes:
        in_flight: requests now running through this gateway, by (node, model).
        loading: loads now running for this gateway, as (node, model).
        draining: (node, model) that take no new requests, because the model is about to be unloaded there.
        loaded_at: when a model came to be on a node (`time.monotonic`), by (node, model), if it was seen to come.
        used_at: when a model last had a request on a node (`time.monotonic`), by (node, model).
    """

    nodes: tuple[Node, ...]
    in_flight: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    loading: frozenset[tuple[str, str]] = frozenset()
    draining: frozenset[tuple[str, str]] = frozenset()
    loaded_at: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    used_at: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])

    def load(self, node: Node, model: str) -> int:
        """How busy `model` is on `node`: requests through this gateway now, and others at the last poll."""
        return self.in_flight.get((node.name, model), 0) + node.others.get(model, 0)

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


class Fleet:
    """The one owner of the picture."""

    def __init__(self, neurons: Iterable[tuple[str, str]]) -> None:
        """`neurons`: (name, base URL) of every node."""
        self._nodes = {name: Node(name, endpoint) for name, endpoint in neurons}
        self._in_flight: Counter[tuple[str, str]] = Counter()
        self._loading: set[tuple[str, str]] = set()
        self._draining: set[tuple[str, str]] = set()
        self._loaded_at: dict[tuple[str, str], float] = {}
        self._unloaded_at: dict[tuple[str, str], float] = {}
        self._used_at: dict[tuple[str, str], float] = {}

    def view(self) -> FleetView:
        """The picture now."""
        return FleetView(
            tuple(self._nodes.values()),
            dict(self._in_flight),
            frozenset(self._loading),
            frozenset(self._draining),
            dict(self._loaded_at),
            dict(self._used_at),
        )

    def node(self, name: str) -> Node:
        """One node now."""
        return self._nodes[name]

    def answered(self, name: str, report: Report, began: float) -> None:
        """Take in a successful poll that began at `began` (`time.monotonic`)."""
        node = self._nodes[name]
        if not node.healthy:
            log.info("node %s is up at %s", name, node.endpoint)
        models, urls = dict(report.models), dict(report.urls)
        for model, info in node.models.items():
            if model not in models and self._loaded_at.get((name, model), -inf) >= began:
                models[model] = info  # the answer is older than the load
                urls[model] = node.url(model)
        for model in report.models:
            if model not in node.models and self._unloaded_at.get((name, model), -inf) >= began:
                del models[model]  # the answer is older than the unload
        health = report.health or node.health
        self._note_times(node, models, began)
        self._nodes[name] = replace(
            node,
            healthy=True,
            misses=0,
            discovery=report.discovery or node.discovery,
            health=health,
            models=models,
            urls=urls,
            others=self._others(name, health) if report.health else node.others,
            read_at=began if report.health else node.read_at,
        )

    def missed(self, name: str, reason: str) -> None:
        """Take in a failed poll; the third in a row takes the node down."""
        node = self._nodes[name]
        misses = node.misses + 1
        healthy = node.healthy and misses < MISSES_TO_DOWN
        if (node.healthy and not healthy) or (misses == 1 and not node.healthy):
            log.warning("node %s is down: %s", name, reason)
        self._nodes[name] = replace(node, healthy=healthy, misses=misses, urls={}, others={})

    def loaded(self, name: str, info: ModelInfo, url: str) -> None:
        """Take in a load that just succeeded, so that the next request need not wait for a poll."""
        node = self._nodes[name]
        self._loaded_at[name, info.id] = time.monotonic()
        self._nodes[name] = replace(node, models={**node.models, info.id: info}, urls={**node.urls, info.id: url})

    def unloaded(self, name: str, model: str) -> None:
        """Take in an unload that just succeeded, so that no request goes there until a poll says so."""
        node = self._nodes[name]
        self._unloaded_at[name, model] = time.monotonic()
        self._loaded_at.pop((name, model), None)
        self._nodes[name] = replace(node, models={key: info for key, info in node.models.items() if key != model})

    @contextmanager
    def request(self, name: str, model: str) -> Iterator[None]:
        """Count one request as in flight on a node for as long as the block runs."""
        key = (name, model)
        self._in_flight[key] += 1
        self._used_at[key] = time.monotonic()
        try:
            yield
        finally:
            self._used_at[key] = time.monotonic()
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]

    @contextmanager
    def load(self, name: str, model: str) -> Iterator[None]:
        """Show one load as running for as long as the block runs."""
        self._loading.add((name, model))
        try:
            yield
        finally:
            self._loading.discard((name, model))

    @contextmanager
    def drain(self, name: str, model: str) -> Iterator[None]:
        """Let a model take no new requests on a node for as long as the block runs."""
        self._draining.add((name, model))
        try:
            yield
        finally:
            self._draining.discard((name, model))

    def _note_times(self, node: Node, models: Mapping[str, ModelInfo], began: float) -> None:
        """Note what came to a node, and what others use there; forget what went."""
        for model in models:
            if model not in node.models and node.read_at is not None:  # what was there before us is of unknown age
                self._loaded_at.setdefault((node.name, model), began)
            if node.others.get(model):
                self._used_at[node.name, model] = began
        for times in (self._loaded_at, self._used_at):
            for key in [key for key in times if key[0] == node.name and key[1] not in models]:
                if times[key] < began:
                    del times[key]

    def _others(self, name: str, health: Health | None) -> dict[str, int]:
        reported = health.models if health else []
        return {
            load.id: max(0, load.in_flight + load.queue_depth - self._in_flight.get((name, load.id), 0))
            for load in reported
        }
