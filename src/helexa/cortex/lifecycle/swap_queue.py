"""Who of those that wait for a model comes next. Pure: the gateway and the simulation both decide by it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from helexa.core.errors import ApiError
from helexa.cortex.lifecycle.placement import Cold, Hold, place
from helexa.cortex.lifecycle.situation import Situation


class Wanted(Protocol):
    """A model that requests wait for."""

    @property
    def model(self) -> str:
        """Its id."""
        ...

    @property
    def since(self) -> float:
        """When the oldest of them came (seconds of the fleet's clock)."""
        ...

    @property
    def priority(self) -> int:
        """The highest of theirs; more is sooner."""
        ...


@dataclass(frozen=True)
class Verdict:
    """What becomes of one wanted model."""

    wanted: Wanted
    decision: Cold | Hold | ApiError


def in_turn(wanted: Iterable[Wanted], now: float, swap_wait_secs: float) -> list[Wanted]:
    """Who has waited too long comes first, oldest first; then by priority, then by age."""

    def order(one: Wanted) -> tuple[bool, int, float]:
        overdue = now - one.since >= swap_wait_secs
        return not overdue, 0 if overdue else -one.priority, one.since

    return sorted(wanted, key=order)


def decide(
    wanted: Sequence[Wanted], look: Callable[[], Situation], start: Callable[[Wanted, Cold], None]
) -> list[Verdict]:
    """Decide for all in turn. What has waited too long and still must hold claims its node: nobody overtakes it there.

    Args:
        look: the situation now; asked anew after every start.
        start: begins a load, at once and visibly for `look`.
    """
    situation = look()
    verdicts: list[Verdict] = []
    claimed: set[str] = set()
    swap_wait_secs = situation.settings.swap_wait_secs
    for one in in_turn(wanted, situation.now, swap_wait_secs):
        try:
            decision: Cold | Hold | ApiError = place(situation, one.model, one.since, claimed)
        except ApiError as error:
            decision = error
        verdicts.append(Verdict(one, decision))
        if isinstance(decision, Cold):
            start(one, decision)
            situation = look()
        elif isinstance(decision, Hold) and situation.now - one.since >= swap_wait_secs:
            claimed.add(decision.node)
    return verdicts
