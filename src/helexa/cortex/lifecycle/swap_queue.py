"""Decides the loading order of models for which requests wait.

The gateway and the fleet simulation use these functions.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from helexa.core.errors import ApiError
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot
from helexa.cortex.lifecycle.placement import ColdPlacement, DelayedPlacement, place


class QueuedModel(Protocol):
    """Interface of a model that must be loaded because requests wait for it."""

    @property
    def model(self) -> str:
        """The model's id."""
        ...

    @property
    def since(self) -> float:
        """Arrival time of the oldest request that waits for the model (monotonic seconds)."""
        ...

    @property
    def priority(self) -> int:
        """Highest priority among the requests that wait for the model; a higher number is served first."""
        ...


@dataclass(frozen=True)
class QueueDecision:
    """The decision for one waiting model: load the model, wait, or reject the model's requests with an error."""

    queued: QueuedModel
    decision: ColdPlacement | DelayedPlacement | ApiError


def queue_order(queue: Iterable[QueuedModel], now: float, swap_wait_secs: float) -> list[QueuedModel]:
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
    """Decide for each waiting model whether its load starts, waits or fails, and start the loads that can start.

    The models are handled in the order of `queue_order`. If a model has waited for `swap_wait_secs` and its load still
    cannot start, its probable node is reserved: no load of a later model can start on this node.

    Args:
        queue: the waiting models.
        take_snapshot: returns the current `FleetSnapshot`. It is called at the beginning and after every start.
        start: starts a load. The next snapshot must include the load.

    Returns:
        The decisions, in the order in which the models were handled.
    """
    snapshot = take_snapshot()
    decisions: list[QueueDecision] = []
    claimed: set[str] = set()
    swap_wait_secs = snapshot.settings.swap_wait_secs
    for waiter in queue_order(queue, snapshot.now, swap_wait_secs):
        try:
            decision: ColdPlacement | DelayedPlacement | ApiError = place(snapshot, waiter.model, waiter.since, claimed)
        except ApiError as error:
            decision = error
        decisions.append(QueueDecision(waiter, decision))
        if isinstance(decision, ColdPlacement):
            start(waiter, decision)
            snapshot = take_snapshot()
        elif isinstance(decision, DelayedPlacement) and snapshot.now - waiter.since >= swap_wait_secs:
            claimed.add(decision.node)
    return decisions
