"""Order in which waiting models are loaded.

Pure functions, used by the gateway and by the simulation.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from helexa.core.errors import ApiError
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot
from helexa.cortex.lifecycle.placement import Cold, Hold, place


class Wanted(Protocol):
    """A model that requests wait for."""

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
    """The decision for one waiting model."""

    wanted: Wanted
    decision: Cold | Hold | ApiError


def in_turn(wanted: Iterable[Wanted], now: float, swap_wait_secs: float) -> list[Wanted]:
    """Sort waiting models: first models that waited `swap_wait_secs`, by age; then others by priority and age."""

    def order(one: Wanted) -> tuple[bool, int, float]:
        overdue = now - one.since >= swap_wait_secs
        return not overdue, 0 if overdue else -one.priority, one.since

    return sorted(wanted, key=order)


def decide(
    wanted: Sequence[Wanted], look: Callable[[], FleetSnapshot], start: Callable[[Wanted, Cold], None]
) -> list[Verdict]:
    """Decide for all waiting models in order and return the decisions.

    A model that has waited `swap_wait_secs` and still cannot start reserves its node: later models cannot be placed
    there.

    Args:
        wanted: the waiting models.
        look: returns the current `FleetSnapshot`; called again after every start.
        start: begins a load at once; the next `look` must include the load.
    """
    situation = look()
    verdicts: list[Verdict] = []
    claimed: set[str] = set()
    swap_wait_secs = situation.settings.swap_wait_secs
    for waiter in in_turn(wanted, situation.now, swap_wait_secs):
        try:
            decision: Cold | Hold | ApiError = place(situation, waiter.model, waiter.since, claimed)
        except ApiError as error:
            decision = error
        verdicts.append(Verdict(waiter, decision))
        if isinstance(decision, Cold):
            start(waiter, decision)
            situation = look()
        elif isinstance(decision, Hold) and situation.now - waiter.since >= swap_wait_secs:
            claimed.add(decision.node)
    return verdicts
