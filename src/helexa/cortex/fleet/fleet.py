"""The fleet: the state of all nodes that the gateway uses.

Only the class `Fleet` changes the state. All other code reads it through a `FleetView`.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import Self

from helexa.core.logs import quoted
from helexa.core.node_reports import Health, LocalModels, ModelInfo
from helexa.cortex.config import NeuronSection, RoutingSection
from helexa.cortex.fleet.breaker import ANY, COOLDOWN_SECS, Breakers, Key, Pair
from helexa.cortex.fleet.ejection import ANYONE, EjectionKey, Ejections, Requester
from helexa.cortex.fleet.fleet_view import MISSES_TO_DOWN, FleetView, LocalIndex, Node, Report
from helexa.cortex.upstream.connection_and_timeouts import UpstreamResponse

__all__ = ["Fleet", "FleetView", "Node", "Report"]

log = logging.getLogger(__name__)

_NOT_LOADED = ("loading", "sleeping")

MAX_BUSY_SECS = 30.0
# Longest time for which a third-party backend may send no bytes and answer no polls, and still count as busy, not down.
MAX_SILENCE_SECS = 300.0


class Fleet:
    """Stores and changes the state of all nodes. Events of removed nodes are ignored."""

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
        self._running: defaultdict[str, set[RunningRequest]] = defaultdict(set)
        self._busy_since: dict[str, float] = {}
        self._heard_at: dict[str, float] = {}
        self._loading: set[Pair] = set()
        self._draining: set[Pair] = set()
        self._loaded_at: dict[Pair, float] = {}
        self._unloaded_at: dict[Pair, float] = {}
        self._used_at: dict[Pair, float] = {}
        self._breakers = Breakers(routing.breaker_failures, routing.breaker_reset_secs)
        self._ejections = Ejections()
        self._local = LocalIndex()
        self.serves_local = False
        self._view: FleetView | None = None
        self._view_until = inf
        self.configure(neurons)

    def configure(self, neurons: Iterable[NeuronSection], joined: Collection[str] = ()) -> None:
        """Replace the configured nodes, and set the event `reconfigured`.

        A node keeps its state if its address and kind are unchanged. A node that was cordoned through the API stays
        cordoned until its `cordoned` value in the configuration changes.

        Args:
            joined: names of the nodes that joined with an invitation.
        """
        sections = {neuron.name: neuron for neuron in neurons}
        self._nodes = {
            name: replace(self._node_for(section), joined=name in joined) for name, section in sections.items()
        }
        self._configured = sections
        for model_times in (self._loaded_at, self._unloaded_at, self._used_at):
            for pair in [pair for pair in model_times if pair[0] not in sections]:
                del model_times[pair]
        self._heard_at = {name: time for name, time in self._heard_at.items() if name in sections}
        self._keep_failures(lambda pair: pair[0] in sections)
        self._index_local()
        self.reconfigured.set()

    def serve_local(self, serves_local: bool) -> None:
        """Set whether a request may cause the load of a model on a node's disks."""
        self.serves_local = serves_local
        self._changed()

    def set_routing(self, routing: RoutingSection) -> None:
        """Replace the settings of the circuit breakers, from the next failure on."""
        self._breakers.failures, self._breakers.reset_secs = routing.breaker_failures, routing.breaker_reset_secs

    def view(self) -> FleetView:
        """Return the current state of all nodes: the same object until the state changes."""
        now = self._clock()
        if self._view is None or now >= self._view_until:
            # Breakers and ejections also change with time, without an event. The view is valid until their next change.
            self._view_until = min(self._breakers.changes_at(now), self._ejections.changes_at(now))
            self._view = FleetView(
                tuple(self._nodes.values()),
                MappingProxyType(self._in_flight),
                frozenset(self._loading),
                frozenset(self._draining),
                MappingProxyType(self._loaded_at),
                MappingProxyType(self._used_at),
                self._breakers.open(now),
                self._breakers.cooling_down(now),
                self._ejections.ejected(now),
                self._local,
                self.serves_local,
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

    def heard_at(self, name: str) -> float:
        """Return when a node last sent data (`time.monotonic`); -infinity if never."""
        responses = [request.response for request in self._running.get(name, ())]
        received_at = [response.last_received_at for response in responses if response is not None]
        return max(self._heard_at.get(name, -inf), *received_at, -inf)

    def is_answering(self, name: str) -> bool:
        """Return whether a node runs requests of this gateway, and is not silent.

        A node is silent if it has run requests for `MAX_SILENCE_SECS` and has sent nothing during this time.
        """
        busy_since = self._busy_since.get(name)
        return busy_since is not None and max(busy_since, self.heard_at(name)) > self._clock() - MAX_SILENCE_SECS

    def has(self, node: Node) -> bool:
        """Return whether a node with the name, endpoint and kind of `node` is configured."""
        current = self._nodes.get(node.name)
        return current is not None and (current.endpoint, current.kind) == (node.endpoint, node.kind)

    def bearer(self, name: str) -> str | None:
        """Return the configured API key for requests to a node; None without a key."""
        section = self._configured.get(name)
        return section.bearer.get_secret_value() if section is not None and section.bearer is not None else None

    def cordon(self, name: str, cordoned: bool) -> None:
        """Cordon or uncordon a node. A cordoned node gets no new requests and loads.

        Raises:
            KeyError: the node is not configured.
        """
        if self._nodes[name].cordoned != cordoned:
            log.info("node cordoned node=%s" if cordoned else "node uncordoned node=%s", name)
        self._put(replace(self._nodes[name], cordoned=cordoned))

    def answered(self, name: str, report: Report, began: float) -> None:
        """Store the report of a poll that began at `began` (monotonic seconds).

        Models that were loaded or unloaded since `began` keep their current state, because the report may be too old.
        For a part of the report that is None, the stored value stays.
        """
        node = self._nodes.get(name)
        if node is None:
            return
        if not node.healthy:
            log.info("node is up node=%s endpoint=%s", name, node.endpoint)
        self._heard_at[name] = max(began, self._heard_at.get(name, -inf))
        models, urls = dict(report.models), dict(report.urls)
        for model, info in node.models.items():
            loaded = model in models and models[model].status not in _NOT_LOADED
            if not loaded and self._loaded_at.get((name, model), -inf) >= began:
                models[model] = info  # the poll began before the load ended
                urls[model] = node.url(model)
        for model in report.models:
            if self._unloaded_at.get((name, model), -inf) >= began:  # the poll began before the unload ended
                if model not in node.models:
                    del models[model]
                elif node.models[model].status == "sleeping":
                    models[model] = node.models[model]
        health = report.health or node.health
        self._update_times(node, models, began)
        # A node that was down was probably restarted, so its breakers and ejections are reset.
        self._keep_failures(lambda pair: pair[0] != name or (node.healthy and pair[1] in models))
        self._put(
            replace(
                node,
                polled=True,
                healthy=True,
                misses=0,
                problem=None,
                discovery=report.discovery or node.discovery,
                health=health,
                models=models,
                urls=urls,
                other_requests=self._other_requests(name, health) if report.health else node.other_requests,
                read_at=began if report.health else node.read_at,
            )
        )
        if report.local is not None:
            self.found_local(name, report.local)

    def found_local(self, name: str, local: LocalModels) -> None:
        """Store a node's report about the models on its disks."""
        node = self._nodes.get(name)
        if node is not None and node.local != local:
            self._put(replace(node, local=local))
            self._index_local()

    def missed(self, name: str, reason: str, alive_since: float = inf) -> None:
        """Count a failed poll.

        After `MISSES_TO_DOWN` consecutive failures, the node is down.

        Args:
            alive_since: the node is not down if it answered a poll, or sent bytes of a response, after this time
                (`time.monotonic`).
        """
        node = self._nodes.get(name)
        if node is None:
            return
        misses = node.misses + 1
        # A node that still sends bytes of a response is busy, not down.
        healthy = node.healthy and (misses < MISSES_TO_DOWN or self.heard_at(name) >= alive_since)
        if (node.healthy and not healthy) or (misses == 1 and not node.healthy):
            log.warning("node is down node=%s error=%s; polls go on", name, quoted(reason))
        other_loads = node.other_requests if healthy else {}  # the last known load stays in use until the node is down
        self._put(replace(node, healthy=healthy, misses=misses, problem=reason, other_requests=other_loads))

    def loaded(self, name: str, info: ModelInfo, url: str) -> None:
        """Record a successful load, so that requests need not wait for a poll."""
        node = self._nodes.get(name)
        if node is None:
            return
        self._loaded_at[name, info.id] = self._clock()
        self._put(replace(node, models={**node.models, info.id: info}, urls={**node.urls, info.id: url}))

    def unloaded(self, name: str, model: str) -> None:
        """Record a successful unload, before the next poll reports it."""
        node = self._nodes.get(name)
        if node is None:
            return
        self._unloaded_at[name, model] = self._clock()
        self._loaded_at.pop((name, model), None)
        self._put(replace(node, models={key: info for key, info in node.models.items() if key != model}))

    def lost(self, name: str, model: str) -> None:
        """Record that a node lacks a model that it listed, until a poll finds it again."""
        if name in self._nodes:
            log.warning(
                "node no longer has the model node=%s model=%s; requests go to other nodes until the next poll",
                *(name, quoted(model)),
            )
            self.unloaded(name, model)

    def fell_asleep(self, name: str, model: str) -> None:
        """Record that a model sleeps on its node, before the next poll reports it."""
        node = self._nodes.get(name)
        if node is not None and (info := node.models.get(model)) is not None:
            self._unloaded_at[name, model] = self._clock()
            self._loaded_at.pop((name, model), None)
            asleep = info.model_copy(update={"status": "sleeping", "vram_used_mb": None, "granted_mb": None})
            self._put(replace(node, models={**node.models, model: asleep}))

    def transport_ok(self, name: str, model: str, client: str = ANY) -> None:
        """Record that a node responded to a client's request, with any status."""
        if self._breakers and self._breakers.ok((name, model), self._clock(), client):
            self._changed()

    def transport_failed(self, name: str, model: str, client: str = ANY) -> None:
        """Record a transport failure of a client's request, such as a connection reset.

        If the node's polls succeed, the failures of one client's requests do not open the breaker for other clients.
        """
        node = self._nodes.get(name)
        if node is None:
            return
        # If polls succeed, the cause may be this client's requests, which must not stop the requests of other clients.
        alone = client == ANY or node.misses > 0 or not node.healthy
        if self._breakers.failed((name, model), self._clock(), client, alone=alone) == "open":
            log.warning(
                "model gets no requests on this node for now node=%s model=%s; "
                "requests for this model keep failing there: see the node's log",
                *(name, quoted(model)),
            )
        self._changed()

    def served(self, name: str, model: str, requester: Requester) -> None:
        """Record a complete response of a node to a request."""
        if self._ejections and self._ejections.served((name, model), requester):
            self._changed()

    def rejected(self, name: str, model: str, requester: Requester) -> bool:
        """Record an error about a request's content; return whether the node is suspect.

        A suspect node has rejected several requests in a row. The caller tries the rejected request on another node.
        """
        return name in self._nodes and self._ejections.rejected((name, model), requester.path)

    def struck(self, name: str, model: str, requester: Requester) -> None:
        """Record that a node failed a request that another node served, or broke a stream."""
        if name in self._nodes:
            if self._ejections.struck((name, model), requester, self._clock()):
                log.warning(
                    "model gets few requests on this node for now node=%s model=%s; "
                    "the node fails requests that other nodes serve: see the node's log",
                    name,
                    quoted(model),
                )
            self._changed()

    def busy(self, name: str, model: str, secs: float = COOLDOWN_SECS) -> None:
        """Record a 429 or 503: other nodes are preferred for `secs` seconds.

        Longer times are reduced to `MAX_BUSY_SECS`.
        """
        if name in self._nodes:
            self._breakers.busy((name, model), self._clock(), min(secs, MAX_BUSY_SECS))
            self._changed()

    async def emptied(self, name: str) -> None:
        """Wait until this gateway has no request and no load on a node."""
        while any(node == name for node, _ in (*self._in_flight, *self._loading)):
            self._freed.clear()
            await self._freed.wait()

    def begin(self, request: "RunningRequest") -> None:
        """Count the start of a request for a (node, model) pair."""
        pair = request.pair
        self._used_at[pair] = now = self._clock()
        self._in_flight[pair] += 1
        running = self._running[pair[0]]
        if not running:
            self._busy_since[pair[0]] = now
        running.add(request)
        request.probes = self._breakers.began(pair, now, request.requester.client) if self._breakers else ()
        request.trials = self._ejections.began(pair, request.requester, now) if self._ejections else ()
        if request.probes or request.trials:
            self._changed()

    def end(self, request: "RunningRequest") -> None:
        """Count the end of a request."""
        pair, name = request.pair, request.pair[0]
        self._used_at[pair] = now = self._clock()
        self._in_flight[pair] -= 1
        if not self._in_flight[pair]:
            del self._in_flight[pair]
            self._freed.set()
        if request.response is not None and name in self._nodes:
            self._heard_at[name] = max(request.response.last_received_at, self._heard_at.get(name, -inf))
        self._running[name].discard(request)
        if not self._running[name]:
            del self._running[name], self._busy_since[name]
        if request.probes or request.trials:
            self._breakers.ended(request.probes, now)
            self._ejections.ended(request.trials)
            self._changed()

    def request(self, name: str, model: str, requester: Requester = ANYONE) -> "RunningRequest":
        """Return a context manager during which a request counts as running."""
        return RunningRequest(self, (name, model), requester)

    def load(self, name: str, model: str) -> AbstractContextManager[None]:
        """Return a context manager during which the model counts as loading on the node."""
        return self._member(self._loading, (name, model))

    def drain(self, name: str, model: str) -> AbstractContextManager[None]:
        """Return a context manager during which the node gets no requests for the model."""
        return self._member(self._draining, (name, model))

    @contextmanager
    def _member(self, pairs: set[Pair], pair: Pair) -> Iterator[None]:
        pairs.add(pair)
        self._changed()
        try:
            yield
        finally:
            pairs.discard(pair)
            self._freed.set()
            self._changed()

    def _put(self, node: Node) -> None:
        self._nodes[node.name] = node
        self._changed()

    def _index_local(self) -> None:
        nodes = self._nodes.values()
        self._local = LocalIndex({node.name: node.local.models for node in nodes if node.local is not None})
        self._changed()

    def _keep_failures(self, wanted: Callable[[Pair], bool]) -> None:
        self._breakers.keep(wanted)
        self._ejections.keep(wanted)

    def _changed(self) -> None:
        self._view = None

    def _node_for(self, section: NeuronSection) -> Node:
        node, previous_section = self._nodes.get(section.name), self._configured.get(section.name)
        if node is None or previous_section is None or (node.endpoint, node.kind) != (section.endpoint, section.kind):
            return Node(
                section.name, section.endpoint, section.kind, section.cordoned, allowed_hosts=section.allowed_hosts
            )
        if section.allowed_hosts != previous_section.allowed_hosts:
            # without URLs, the next poll requests them again
            node = replace(node, allowed_hosts=section.allowed_hosts, urls={})
        return node if section.cordoned == previous_section.cordoned else replace(node, cordoned=section.cordoned)

    def _update_times(self, node: Node, models: Mapping[str, ModelInfo], began: float) -> None:
        """Update the times of loads and uses from `models`, polled at the time `began`."""
        for model, info in models.items():
            is_new = model not in node.models or node.models[model].status in _NOT_LOADED
            if info.status == "sleeping" and self._loaded_at.get((node.name, model), began) < began:
                del self._loaded_at[node.name, model]
            # Models in a node's first report (`read_at` is None) were loaded at an unknown earlier time.
            if is_new and info.status not in _NOT_LOADED and node.read_at is not None:
                self._loaded_at.setdefault((node.name, model), began)
            # requests of another gateway or client use the model
            if node.other_requests.get(model):
                self._used_at[node.name, model] = began
        for model_times in (self._loaded_at, self._unloaded_at, self._used_at):
            for key in [key for key in model_times if key[0] == node.name and key[1] not in models]:
                if model_times[key] < began:
                    del model_times[key]

    def _other_requests(self, name: str, health: Health | None) -> dict[str, int]:
        model_loads = health.models if health else []
        return {
            # The report may be older than some of this gateway's requests, so a difference may be negative.
            load.id: max(0, load.in_flight + load.queue_depth - self._in_flight.get((name, load.id), 0))
            for load in model_loads
        }


class RunningRequest:
    """Context manager during which one request counts as running on its node.

    Attributes:
        requester: client and API path of the request.
        response: the node's response, set by the code in the `with` block; None before it begins. Its bytes show that
            the node is alive.
        probes: keys of the half-open circuit breakers whose probe is this request.
        trials: keys of the ejections whose trial is this request.
    """

    __slots__ = ("_fleet", "pair", "probes", "requester", "response", "trials")

    # This is a class and not a generator function, because every request uses it, and a generator would be slower.
    def __init__(self, fleet: Fleet, pair: Pair, requester: Requester) -> None:
        self._fleet = fleet
        self.pair, self.requester = pair, requester
        self.response: UpstreamResponse | None = None
        self.probes: tuple[Key, ...] = ()
        self.trials: tuple[EjectionKey, ...] = ()

    def __enter__(self) -> Self:
        self._fleet.begin(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._fleet.end(self)
