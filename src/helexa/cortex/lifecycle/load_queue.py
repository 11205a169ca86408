"""Models for which requests wait, and the order in which they are loaded."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any

from helexa.core.errors import ApiError, overloaded, service_unavailable
from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot
from helexa.cortex.lifecycle.load_job import LoadJob, Progress
from helexa.cortex.lifecycle.placement import ColdPlacement, DelayedPlacement, place
from helexa.cortex.routing import WarmRoute

MAX_WAITERS = 256
RETRY_CROWDED = 5

_RETRY_UNKNOWN_SECS = 10
_MAX_RETRY_SECS = 3600


@dataclass(frozen=True)
class WaitingRequest:
    """A request that waits until its model is loaded. A higher `priority` comes first.

    Attributes:
        enqueued: when the request arrived (monotonic seconds).
        prompt: name under which nodes report the beginning of this request's prompt (see `routing.prefix_name`); empty
            if the request has no prompt.
    """

    priority: int = 0
    enqueued: float = field(default_factory=time.monotonic)
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class QueuedModel:
    """A model that must be loaded because requests wait for it.

    Attributes:
        node: name of the node on which the model must be loaded, or None if any node will do.
        since: arrival time of the oldest request that waits for the model (monotonic seconds).
        priority: highest priority of the waiting requests; a higher number goes first.
        prompts: names of the waiting requests' prompts. A node that has saved one of these prompts is preferred.
    """

    model: str
    since: float
    priority: int = 0
    node: str | None = None
    prompts: frozenset[str] = frozenset()


class PendingLoad:
    """A model that must be loaded, and the requests that wait for it."""

    def __init__(self, model: str, node: str | None = None, *, by_admin: bool = False) -> None:
        self.model = model
        self.node = node  # name of the node that an administrator has chosen for the load; None if any node will do
        # Whether an administrator has requested the load. The model may then be any model on the disks of nodes.
        self.by_admin = by_admin
        # future that is resolved with the node and URL that serve the model, or with the error response
        self.outcome: asyncio.Future[WarmRoute] = asyncio.get_running_loop().create_future()
        self.job: LoadJob | None = None  # the running load; None if the load has not started
        # the last decision about this load, with its probable node and start, if the load must wait; else None
        self.delayed: DelayedPlacement | None = None
        self._waiters: list[WaitingRequest] = []

    @property
    def queued(self) -> QueuedModel:
        """The model with arrival, priority and prompts of the requests that wait for it."""
        since = min((waiter.enqueued for waiter in self._waiters), default=inf)
        priority = max((waiter.priority for waiter in self._waiters), default=0)
        prompts = frozenset(waiter.prompt for waiter in self._waiters if waiter.prompt)
        return QueuedModel(self.model, since, priority, self.node, prompts)

    def has_waiters(self) -> bool:
        """Return whether any request waits for the model."""
        return bool(self._waiters)

    @contextmanager
    def waiting(self, request: WaitingRequest) -> Iterator[None]:
        """Return a context manager during which `request` counts as waiting.

        Raises:
            ApiError: 503 if `MAX_WAITERS` requests already wait for the model.
        """
        if len(self._waiters) >= MAX_WAITERS:
            raise overloaded(
                f"{MAX_WAITERS} requests already wait for model '{self.model}' to load; retry in {RETRY_CROWDED} s",
                RETRY_CROWDED,
            )
        self._waiters.append(request)
        try:
            yield
        finally:
            self._waiters.remove(request)


@dataclass(frozen=True)
class QueueDecision:
    """The decision for one waiting model: load it, wait, or reject its requests."""

    queued: QueuedModel
    decision: ColdPlacement | DelayedPlacement | ApiError


def _queue_order(queue: Iterable[QueuedModel], now: float, swap_wait_secs: float) -> list[QueuedModel]:
    """Return the waiting models in the order in which `decide` handles them.

    Models that have waited for at least `swap_wait_secs` come first, the longest wait first. All other models follow,
    sorted by priority, then by waiting time.
    """

    def order(queued: QueuedModel) -> tuple[bool, int, float]:
        overdue = now - queued.since >= swap_wait_secs
        return not overdue, 0 if overdue else -queued.priority, queued.since

    return sorted(queue, key=order)


def decide(
    queue: Sequence[QueuedModel],
    take_snapshot: Callable[[], FleetSnapshot],
    start: Callable[[QueuedModel, ColdPlacement], None],
) -> list[QueueDecision]:
    """Start the loads that can start; return the decision for each waiting model.

    The models are handled in the order of `_queue_order`. If a model has waited for `swap_wait_secs` and its load still
    cannot start, its probable node is reserved: no load of a later model can start on this node.

    Args:
        take_snapshot: returns the current `FleetSnapshot`. It is called at the beginning and after every start.
        start: starts a load. The next snapshot must include the load.

    Returns:
        The decisions, in the order in which the models were handled.
    """
    snapshot = take_snapshot()
    decisions: list[QueueDecision] = []
    claimed: set[str] = set()
    swap_wait_secs = snapshot.settings.swap_wait_secs
    for waiter in _queue_order(queue, snapshot.now, swap_wait_secs):
        try:
            eligible = snapshot if waiter.node is None else snapshot.restricted(waiter.node.__eq__)
            decision: ColdPlacement | DelayedPlacement | ApiError = place(
                eligible, waiter.model, waiter.since, claimed, waiter.prompts
            )
        except ApiError as error:
            decision = error
        decisions.append(QueueDecision(waiter, decision))
        if isinstance(decision, ColdPlacement):
            start(waiter, decision)
            snapshot = take_snapshot()
        elif isinstance(decision, DelayedPlacement) and snapshot.now - waiter.since >= swap_wait_secs:
            # Otherwise, later models with short waits could take the node's memory again and again.
            claimed.add(decision.node)
    return decisions


@dataclass(frozen=True)
class LoadFailure:
    """In the load report: the last failed load of a model on a node."""

    message: str
    temporary: bool  # True if the same load may succeed later
    times: int  # number of consecutive failures, including this one
    retry_at: int  # from this time on, requests for the model start the load again (Unix seconds)

    def json_dict(self) -> dict[str, Any]:
        """Return the failure as a JSON object."""
        return {
            "message": self.message,
            "temporary": self.temporary,
            "times": self.times,
            "retry_at": self.retry_at,
        }


@dataclass(frozen=True)
class LoadReport:
    """The loads of this gateway, and when idle models will be unloaded.

    The keys are pairs (node name, model id).
    """

    loads: Mapping[Pair, Progress] = field(default_factory=dict[Pair, Progress])
    failures: Mapping[Pair, LoadFailure] = field(default_factory=dict[Pair, LoadFailure])
    unload_at: Mapping[Pair, int] = field(default_factory=dict[Pair, int])  # Unix seconds


async def wait_until_loaded(pending: PendingLoad, limit_secs: float, eta: Callable[[], float | None]) -> WarmRoute:
    """Wait at most `limit_secs` for the load; return the node that serves the model.

    Args:
        eta: function that returns the expected seconds until the model is loaded, or None if they are unknown.

    Raises:
        ApiError: 503 with Retry-After if the model is not loaded in time, or will probably take more than twice
            `limit_secs`. If the load fails, the error of the load.
    """
    expected = eta()
    # If the load will probably take too long, reject the request now. The factor 2 allows for rough estimates.
    if not pending.outcome.done() and expected is not None and expected > 2 * max(limit_secs, 1.0):
        raise _timeout_error(pending, expected)
    try:
        async with asyncio.timeout(max(0.0, limit_secs)):
            # Without `shield`, the timeout would cancel the future, and other requests wait for the same future.
            return await asyncio.shield(pending.outcome)
    except TimeoutError:
        raise _timeout_error(pending, eta()) from None


def _timeout_error(pending: PendingLoad, eta: float | None) -> ApiError:
    retry_after = _RETRY_UNKNOWN_SECS if eta is None else min(max(1, ceil(eta)), _MAX_RETRY_SECS)
    state = "is still loading" if pending.job is not None else "still waits for memory"
    return service_unavailable(f"model '{pending.model}' {state}; retry in {retry_after} s", retry_after)
