"""A simulated fleet with a virtual clock. Nodes load models, prefill, decode and cache prefixes in simulated time.

The gateway's own class `Fleet` holds the state of the fleet. A policy chooses the nodes of requests, and the models to
load and to evict.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from helexa.core.catalog import Catalog
from helexa.core.node_reports import Discovery, ModelInfo
from helexa.cortex.config import NeuronSection
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.fleet_view import Report
from helexa.cortex.lifecycle.load_history import LoadHistory
from helexa.cortex.lifecycle.load_queue import QueuedModel
from helexa.cortex.lifecycle.memory import MemoryChange, MemoryEstimator, additional_mb
from helexa.cortex.lifecycle.placement import ColdPlacement
from support.fleet_traffic import Conversation, Turn

NODES_MB = {"n1": 48_000, "n2": 24_000, "n3": 24_000, "n4": 16_000, "n5": 12_000}
SLOTS = 8
CACHED_CONVERSATIONS = 24
LOAD_MB_PER_SEC = 900.0
LOAD_OVERHEAD_SECS = 4.0
UNLOAD_SECS = 1.0
PREFILL_TOKENS_MB = 24e6  # tokens per second of a model with a size of one MB
DECODE_TOKENS_MB = 500e3
TICK_SECS = 0.25


@dataclass
class Request:
    """A request of a simulated conversation that waits or runs.

    Attributes:
        turn: number of new tokens and of output tokens.
        index: index of the request in its conversation.
        prompt: number of prompt tokens, including all earlier requests and responses of the conversation.
        arrived_at: simulated time of the request, in seconds.
        fleet_changes: reverts the changes to the state of the fleet when the request ends.
    """

    conversation: Conversation
    turn: Turn
    index: int
    prompt: int
    arrived_at: float
    first_token: float | None = None
    fleet_changes: ExitStack = field(default_factory=ExitStack)

    @property
    def model(self) -> str:
        return self.conversation.model


@dataclass
class Queue:
    """The requests for one model that wait because no node has loaded the model.

    Attributes:
        requests: the waiting requests, oldest first.
        loading: whether a load of the model has started.
    """

    model: str
    requests: list[Request]
    loading: bool = False

    @property
    def queued(self) -> QueuedModel:
        return QueuedModel(self.model, self.requests[0].arrived_at)


@dataclass
class Instance:
    """A model that is loaded on a node.

    Attributes:
        size_mb: memory of the model in MB.
        running: number of running requests.
        queue: requests that wait for a slot in the batch.
        cached: number of tokens in the prefix cache, by conversation; the least recently used conversation comes first.
    """

    size_mb: int
    running: int = 0
    queue: deque[Request] = field(default_factory=deque[Request])
    cached: OrderedDict[str, int] = field(default_factory=OrderedDict[str, int])


class Policy(Protocol):
    """Chooses the nodes of requests, and the models to load and to evict."""

    def target(self, world: "World", request: Request) -> str | None:
        """Return the name of the node that serves the request now, or None if the request must wait for a load."""
        ...

    def decide(self, world: "World") -> None:
        """Call `world.start` for every model that can be loaded now."""
        ...


@dataclass
class Outcome:
    """The results of a simulation. Times are in simulated seconds.

    Attributes:
        ttfts: time to first token of each request.
        waits: time that each request waited until its model was loaded.
        loads, evictions: number of loaded models and of evicted models.
        prompt_tokens: number of prompt tokens of all requests.
        cached_tokens: number of these tokens that were found in a prefix cache.
        secs: duration of the simulation.
    """

    ttfts: list[float] = field(default_factory=list[float])
    waits: list[float] = field(default_factory=list[float])
    loads: int = 0
    evictions: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    secs: float = 0.0


class World:
    """A simulation of a fleet with one policy. The method `run` runs the simulation."""

    def __init__(
        self, catalog: Catalog, policy: Policy, conversations: list[Conversation], nodes: Mapping[str, int]
    ) -> None:
        self.now = 0.0
        self.catalog = catalog
        self.history = LoadHistory()
        self.memory = MemoryEstimator()
        self.queues: dict[str, Queue] = {}
        self.outcome = Outcome()
        self.fleet = Fleet(
            [NeuronSection(name=name, endpoint=f"http://{name}") for name in nodes], clock=lambda: self.now
        )
        for name, megabytes in nodes.items():
            device = {"index": 0, "name": "GPU", "vram_total_mb": megabytes}
            facts = Discovery.model_validate({"hostname": name, "os": "Linux", "devices": [device]})
            self.fleet.answered(name, Report({}, discovery=facts), 0.0)
        self._policy = policy
        self._instances: dict[tuple[str, str], Instance] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._ticking = False
        for conversation in conversations:
            self._at(conversation.begins, lambda instance=conversation: self._ask(instance, 0, 0))

    def run(self) -> Outcome:
        """Simulate until every conversation has ended. Return the results."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        assert not self.queues, "a client was never served"
        self.outcome.secs = self.now
        return self.outcome

    def start(self, queue: Queue, cold: ColdPlacement) -> None:
        """Start the load of a model: drain the models to evict, unload them, then load the model.

        Args:
            queue: the requests that wait for the model.
            cold: the model to load, its node, and the models to evict.
        """
        queue.loading = True
        fleet_changes = ExitStack()
        fleet_changes.enter_context(self.fleet.load(cold.node, cold.model))
        for model in cold.evict:
            fleet_changes.enter_context(self.fleet.drain(cold.node, model))
        change = MemoryChange(
            additional_mb({0: self._size(cold.model)}, [{0: self._size(model)} for model in cold.evict])
        )
        self.memory.begin(self.fleet.node(cold.node), change)
        fleet_changes.callback(self.memory.cancel, cold.node, change)
        self._drain(cold, fleet_changes, change)

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _drain(self, cold: ColdPlacement, fleet_changes: ExitStack, change: MemoryChange) -> None:
        if any(self.fleet.view().in_flight.get((cold.node, model)) for model in cold.evict):
            self._at(self.now + TICK_SECS, lambda: self._drain(cold, fleet_changes, change))
            return
        for model in cold.evict:
            leaving = self._instances.pop((cold.node, model))
            assert not leaving.running and not leaving.queue, f"{model} left {cold.node} while in use"
            self.fleet.unloaded(cold.node, model)
            self.outcome.evictions += 1
        size = self._size(cold.model)
        change.megabytes = {0: size}
        secs = LOAD_OVERHEAD_SECS + size / LOAD_MB_PER_SEC
        self._at(self.now + UNLOAD_SECS * len(cold.evict) + secs, lambda: self._loaded(cold, fleet_changes, secs))

    def _loaded(self, cold: ColdPlacement, fleet_changes: ExitStack, secs: float) -> None:
        self._instances[cold.node, cold.model] = Instance(self._size(cold.model))
        self.fleet.loaded(cold.node, ModelInfo(id=cold.model), "http://x")
        fleet_changes.close()
        self.history.loaded((cold.node, cold.model), secs)
        self.outcome.loads += 1
        self._check_memory(cold.node)
        for request in self.queues.pop(cold.model).requests:
            self._route(request)
        self._decide()

    def _check_memory(self, node: str) -> None:
        used_mb = sum(instance.size_mb for (name, _), instance in self._instances.items() if name == node)
        facts = self.fleet.node(node).discovery
        assert facts is not None and used_mb <= facts.devices[0].vram_total_mb, f"{node} is overfull"

    def _ask(self, conversation: Conversation, index: int, context_tokens: int) -> None:
        turn = conversation.turns[index]
        self._route(Request(conversation, turn, index, context_tokens + turn.new, self.now))

    def _route(self, request: Request) -> None:
        name = self._policy.target(self, request)
        if name is None:
            queue = self.queues.setdefault(request.model, Queue(request.model, []))
            queue.requests.append(request)
            self._decide()
            return
        self.outcome.waits.append(self.now - request.arrived_at)
        request.fleet_changes.enter_context(self.fleet.request(name, request.model))
        instance = self._instances[name, request.model]
        instance.queue.append(request)
        self._fill(instance)

    def _fill(self, instance: Instance) -> None:
        while instance.queue and instance.running < SLOTS:
            request = instance.queue.popleft()
            instance.running += 1
            cached = min(instance.cached.pop(request.conversation.name, 0), request.prompt)
            self.outcome.prompt_tokens += request.prompt
            self.outcome.cached_tokens += cached
            prefill = (request.prompt - cached) * instance.size_mb / PREFILL_TOKENS_MB
            decode = request.turn.answer_tokens * instance.size_mb / DECODE_TOKENS_MB
            self.outcome.ttfts.append(self.now + prefill - request.arrived_at)
            self._at(self.now + prefill + decode, lambda request=request: self._done(instance, request))

    def _done(self, instance: Instance, request: Request) -> None:
        request.fleet_changes.close()
        instance.running -= 1
        length = request.prompt + request.turn.answer_tokens
        instance.cached[request.conversation.name] = length
        while len(instance.cached) > CACHED_CONVERSATIONS:
            instance.cached.popitem(last=False)
        self._fill(instance)
        following = request.index + 1
        if following < len(request.conversation.turns):
            pause = request.conversation.turns[following].pause_secs
            self._at(self.now + pause, lambda: self._ask(request.conversation, following, length))

    def _decide(self) -> None:
        """Let the policy start loads. If models still wait for memory, call the policy again after `TICK_SECS`."""
        self._policy.decide(self)
        if not self._ticking and any(not queue.loading for queue in self.queues.values()):
            self._ticking = True
            self._at(self.now + TICK_SECS, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        for queue in [queue for queue in self.queues.values() if not queue.loading]:
            if self._policy.target(self, queue.requests[0]) is not None:  # a node has loaded the model in the meantime
                del self.queues[queue.model]
                for request in queue.requests:
                    self._route(request)
        self._decide()

    def _size(self, model: str) -> int:
        profile = self.catalog.profile(model)
        assert profile is not None
        return profile.vram_mb or 0
