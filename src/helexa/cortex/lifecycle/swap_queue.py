"""The order in which waiting models are loaded.

The functions are used by the gateway and by the fleet simulation.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from helexa.core.errors import ApiError
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot
from helexa.cortex.lifecycle.placement import Cold, Hold, place


class QueuedModel(Protocol):
    """A model that waits to be loaded."""

    @property
    def model(self) -> str:
        """The model's id."""
        ...

    @property
    def since(self) -> float:
        """Arrival time of the oldest waiting request (seconds of the fleet's clock)."""
        ...

    @property
    def priority(self) -> int:
        """Highest priority among the waiting requests; a higher number is served first."""
        ...


@dataclass(frozen=True)
class Verdict:
    """The decision for one waiting model: load it, wait, or reject its requests."""

    queued: QueuedModel
    decision: Cold | Hold | ApiError


def queue_order(queue: Iterable[QueuedModel], now: float, swap_wait_secs: float) -> list[QueuedModel]:
    """Return the waiting models in the order of decisions.

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
    start: Callable[[QueuedModel, Cold], None],
) -> list[Verdict]:
    """Decide for each waiting model in the order of `queue_order`; start the loads that can start.

    If a model has waited for `swap_wait_secs` and its load still cannot start, the node that it will probably be loaded
    on is reserved: later models in the order cannot be placed on this node.

    Args:
        queue: the waiting models.
        take_snapshot: returns the current `FleetSnapshot`; called at the beginning and after every start.
        start: starts a load; the next snapshot must include the load.
    """
    snapshot = take_snapshot()
    verdicts: list[Verdict] = []
    claimed: set[str] = set()
    swap_wait_secs = snapshot.settings.swap_wait_secs
    for waiter in queue_order(queue, snapshot.now, swap_wait_secs):
        try:
            decision: Cold | Hold | ApiError = place(snapshot, waiter.model, waiter.since, claimed)
        except ApiError as error:
            decision = error
        verdicts.append(Verdict(waiter, decision))
        if isinstance(decision, Cold):
            start(waiter, decision)
            snapshot = take_snapshot()
        elif isinstance(decision, Hold) and snapshot.now - waiter.since >= swap_wait_secs:
            claimed.add(decision.node)
    return verdicts
