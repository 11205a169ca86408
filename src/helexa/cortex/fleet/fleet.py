"""The fleet: the state of all nodes that the gateway uses.

Only the class `Fleet` changes the state. All other code reads it through a `FleetView`.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from types import MappingProxyType

from helexa.core.fleet import Health, ModelInfo
from helexa.cortex.config import NeuronSection, RoutingSection
from helexa.cortex.fleet.breaker import WARY_SECS, Breakers, Pair
from helexa.cortex.fleet.fleet_view import FleetView, Node, Report

__all__ = ["Fleet", "FleetView", "Node", "Report"]

log = logging.getLogger(__name__)

MISSES_TO_DOWN = 3
MAX_BUSY_SECS = 30.0


class Fleet:
    """Stores and changes the state of all nodes.

    A node can be removed from the configuration at any time. Events that concern a removed node are then ignored.
    """

    def __init__(
        self,
        neurons: Iterable[NeuronSection],
        routing: RoutingSection | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        routing = routing or RoutingSection()
        self.reconfigured = asyncio.Event()
        self._freed = asyncio.Event()
        self._clock = clock
        self._nodes: dict[str, Node] = {}
        self._configured: dict[str, NeuronSection] = {}
        self._in_flight: Counter[Pair] = Counter()
        self._loading: set[Pair] = set()
        self._draining: set[Pair] = set()
        self._loaded_at: dict[Pair, float] = {}
        self._unloaded_at: dict[Pair, float] = {}
        self._used_at: dict[Pair, float] = {}
        self._breakers = Breakers(routing.breaker_failures, routing.breaker_reset_secs)
        self._view: FleetView | None = None
        self._view_until = inf
        self.configure(neurons)

    def configure(self, neurons: Iterable[NeuronSection]) -> None:
        """Replace the configured nodes, and set the event `reconfigured`.

        A node keeps its state if its address and kind are unchanged. A node that was cordoned through the API stays
        cordoned until its `cordoned` value in the configuration changes.
        """
        sections = {neuron.name: neuron for neuron in neurons}
        self._nodes = {name: self._node_for(section) for name, section in sections.items()}
        self._configured = sections
        for model_times in (self._loaded_at, self._unloaded_at, self._used_at):
            for pair in [pair for pair in model_times if pair[0] not in sections]:
                del model_times[pair]
        self._breakers.keep(lambda pair: pair[0] in sections)
        self._changed()
        self.reconfigured.set()

    def set_routing(self, routing: RoutingSection) -> None:
        """Store new circuit breaker settings, which apply from the next transport failure on."""
        self._breakers.failures, self._breakers.reset_secs = routing.breaker_failures, routing.breaker_reset_secs

    def view(self) -> FleetView:
        """Return the current state of all nodes. The same object is returned until the state changes."""
        now = self._clock()
        if self._view is None or now >= self._view_until:
            self._view_until = self._breakers.changes_at(now)
            self._view = FleetView(
                tuple(self._nodes.values()),
                MappingProxyType(self._in_flight),
                frozenset(self._loading),
                frozenset(self._draining),
                MappingProxyType(self._loaded_at),
                MappingProxyType(self._used_at),
                self._breakers.open(now),
                self._breakers.wary(now),
            )
        return self._view

    def node(self, name: str) -> Node:
        """Return the current state of one node.

        Raises:
            KeyError: the node is not configured.
        """
        return self._nodes[name]

    def is_alive(self, name: str) -> bool:
        """Return whether a node is configured and healthy according to its last polls."""
        node = self._nodes.get(name)
        return node is not None and node.healthy

    def has(self, node: Node) -> bool:
        """Return whether the configuration still contains a node with the name, address and kind of `node`."""
        current = self._nodes.get(node.name)
        return current is not None and (current.endpoint, current.kind) == (node.endpoint, node.kind)

    def bearer(self, name: str) -> str | None:
        """Return the API key that the gateway sends to a node, or None if no key is configured.

        Keys are not part of a `FleetView`.
        """
        section = self._configured.get(name)
        return section.bearer.get_secret_value() if section is not None and section.bearer is not None else None

    def cordon(self, name: str, cordoned: bool) -> None:
        """Cordon or uncordon a node. A cordoned node gets no new requests and loads.

        Raises:
            KeyError: the node is not configured.
        """
        if self._nodes[name].cordoned != cordoned:
            log.info("node %s is %s", name, "cordoned" if cordoned else "uncordoned")
        self._put(replace(self._nodes[name], cordoned=cordoned))

    def answered(self, name: str, report: Report, began: float) -> None:
        """Update a node's state with the report of a successful poll that began at `began` (monotonic seconds).

        Models that were loaded or unloaded since `began` keep their current state, because the report may be too old.
        """
        node = self._nodes.get(name)
        if node is None:
            return
        if not node.healthy:
            log.info("node %s is up at %s", name, node.endpoint)
        models, urls = dict(report.models), dict(report.urls)
        for model, info in node.models.items():
            loaded = model in models and models[model].status != "loading"
            if not loaded and self._loaded_at.get((name, model), -inf) >= began:
                models[model] = info  # the poll began before the load ended
                urls[model] = node.url(model)
        for model in report.models:
            if model not in node.models and self._unloaded_at.get((name, model), -inf) >= began:
                del models[model]  # the poll began before the unload ended
        health = report.health or node.health
        self._update_times(node, models, began)
        # A node that returns after it was down was restarted, so its breakers are reset.
        self._breakers.keep(lambda pair: pair[0] != name or (node.healthy and pair[1] in models))
        self._put(
            replace(
                node,
                healthy=True,
                misses=0,
                discovery=report.discovery or node.discovery,
                health=health,
                models=models,
                urls=urls,
                other_requests=self._other_requests(name, health) if report.health else node.other_requests,
                read_at=began if report.health else node.read_at,
            )
        )

    def missed(self, name: str, reason: str) -> None:
        """Count a failed poll. After `MISSES_TO_DOWN` consecutive failures, the node is down."""
        node = self._nodes.get(name)
        if node is None:
            return
        misses = node.misses + 1
        healthy = node.healthy and misses < MISSES_TO_DOWN
        if (node.healthy and not healthy) or (misses == 1 and not node.healthy):
            log.warning("node %s is down: %s", name, reason)
        other_loads = node.other_requests if healthy else {}  # the last known load stays in use until the node is down
        self._put(replace(node, healthy=healthy, misses=misses, other_requests=other_loads))

    def loaded(self, name: str, info: ModelInfo, url: str) -> None:
        """Record a successful load, so that requests can be sent to the model before the next poll."""
        node = self._nodes.get(name)
        if node is None:
            return
        self._loaded_at[name, info.id] = self._clock()
        self._put(replace(node, models={**node.models, info.id: info}, urls={**node.urls, info.id: url}))

    def unloaded(self, name: str, model: str) -> None:
        """Record a successful unload, so that no request is sent to the model before the next poll."""
        node = self._nodes.get(name)
        if node is None:
            return
        self._unloaded_at[name, model] = self._clock()
        self._loaded_at.pop((name, model), None)
        self._put(replace(node, models={key: info for key, info in node.models.items() if key != model}))

    def transport_ok(self, name: str, model: str) -> None:
        """Record that a node responded to a request for the model, with any status."""
        pair = (name, model)
        if pair in self._breakers:
            self._breakers.ok(pair, self._clock())
            self._changed()

    def transport_failed(self, name: str, model: str) -> None:
        """Record a transport failure of a request for the model, such as a failed or reset connection."""
        if name in self._nodes:
            if self._breakers.failed((name, model), self._clock()) == "open":
                log.warning("node %s gets no requests for %s for now: requests keep failing", name, model)
            self._changed()

    def busy(self, name: str, model: str, secs: float = WARY_SECS) -> None:
        """Record a 429 or 503 response: the router prefers other nodes for `secs`, at most `MAX_BUSY_SECS`."""
        if name in self._nodes:
            self._breakers.busy((name, model), self._clock(), min(secs, MAX_BUSY_SECS))
            self._changed()

    async def emptied(self, name: str) -> None:
        """Wait until this gateway has no running request and no running model load on a node."""
        while any(node == name for node, _ in (*self._in_flight, *self._loading)):
            self._freed.clear()
            await self._freed.wait()

    def begin(self, pair: Pair) -> bool:
        """Count the start of a request for a (node, model) pair.

        Return whether the request is the probe of a half-open circuit breaker. The caller must pass this result to
        `end`.
        """
        self._used_at[pair] = now = self._clock()
        self._in_flight[pair] += 1
        is_probe = self._breakers.began(pair, now)
        if is_probe:
            self._changed()
        return is_probe

    def end(self, pair: Pair, probe: bool) -> None:
        """Count the end of a request. `probe` is the result that `begin` returned for this request."""
        self._used_at[pair] = now = self._clock()
        self._in_flight[pair] -= 1
        if not self._in_flight[pair]:
            del self._in_flight[pair]
            self._freed.set()
        if probe:
            self._breakers.ended(pair, now)
            self._changed()

    def request(self, name: str, model: str) -> "RunningRequest":
        """Return a context manager during which one request for the model counts as running on the node."""
        return RunningRequest(self, (name, model))

    @contextmanager
    def load(self, name: str, model: str) -> Iterator[None]:
        """Return a context manager during which the model counts as loading on the node."""
        self._loading.add((name, model))
        self._changed()
        try:
            yield
        finally:
            self._loading.discard((name, model))
            self._freed.set()
            self._changed()

    @contextmanager
    def drain(self, name: str, model: str) -> Iterator[None]:
        """Return a context manager during which the node gets no new requests for the model."""
        self._draining.add((name, model))
        self._changed()
        try:
            yield
        finally:
            self._draining.discard((name, model))
            self._changed()

    def _put(self, node: Node) -> None:
        self._nodes[node.name] = node
        self._changed()

    def _changed(self) -> None:
        self._view = None

    def _node_for(self, section: NeuronSection) -> Node:
        node, previous_section = self._nodes.get(section.name), self._configured.get(section.name)
        if node is None or previous_section is None or (node.endpoint, node.kind) != (section.endpoint, section.kind):
            return Node(section.name, section.endpoint, section.kind, section.cordoned, section.allowed_hosts)
        if section.allowed_hosts != previous_section.allowed_hosts:
            # without URLs, the next poll requests them again
            node = replace(node, allowed_hosts=section.allowed_hosts, urls={})
        return node if section.cordoned == previous_section.cordoned else replace(node, cordoned=section.cordoned)

    def _update_times(self, node: Node, models: Mapping[str, ModelInfo], began: float) -> None:
        """Update when the node's models were loaded and last used, after a poll that began at `began`.

        The times of models that the node no longer reports are deleted.
        """
        for model, info in models.items():
            is_new = model not in node.models or node.models[model].status == "loading"
            # in a node's first report, load times are unknown
            if is_new and info.status != "loading" and node.read_at is not None:
                self._loaded_at.setdefault((node.name, model), began)
            if node.other_requests.get(model):
                self._used_at[node.name, model] = began
        for model_times in (self._loaded_at, self._unloaded_at, self._used_at):
            for key in [key for key in model_times if key[0] == node.name and key[1] not in models]:
                if model_times[key] < began:
                    del model_times[key]

    def _other_requests(self, name: str, health: Health | None) -> dict[str, int]:
        model_loads = health.models if health else []
        return {
            load.id: max(0, load.in_flight + load.queue_depth - self._in_flight.get((name, load.id), 0))
            for load in model_loads
        }


class RunningRequest:
    """Context manager during which one request counts as running on its node.

    This is a class because a generator-based context manager is slower, and every request uses it.
    """

    __slots__ = ("_fleet", "_pair", "_probe")

    def __init__(self, fleet: Fleet, pair: Pair) -> None:
        self._fleet, self._pair, self._probe = fleet, pair, False

    def __enter__(self) -> None:
        self._probe = self._fleet.begin(self._pair)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._fleet.end(self._pair, self._probe)
