"""Circuit breakers: who keeps failing is not asked for a while, then tried with one request. Pure, on a given clock.

Only transport errors count: no connection, a reset, silence of a node whose polls fail too, a response that is not
HTTP. An error response of a node does not count, nor does a request for which a living node takes too long. A node that
answers 429 or 503 is passed over for a moment instead.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

Pair = tuple[str, str]
"""A node and one of its models, by name."""

State = Literal["closed", "open", "half-open"]

WARY_SECS = 1.0


@dataclass(frozen=True)
class Breaker:
    """How far one node is trusted with one model. Every transition gives a new one; times are seconds of one clock.

    Attributes:
        faults: in a row, while closed.
        open_until: closed while None; from this time on it is half-open.
        probing: a request is trying whether the node works again.
        wary_until: it failed or was busy a moment ago: others come first until then.
    """

    faults: int = 0
    open_until: float | None = None
    probing: bool = False
    wary_until: float = -inf

    def state(self, now: float) -> State:
        """`closed`: asked. `open`: not asked. `half-open`: may be asked once."""
        if self.open_until is None:
            return "closed"
        return "open" if self.probing or now < self.open_until else "half-open"

    def began(self, now: float) -> "Breaker":
        """A request sets out; in the half-open state it is the probe."""
        return replace(self, probing=True) if self.state(now) == "half-open" else self

    def ended(self) -> "Breaker":
        """The probe is over; when nothing was learnt from it (its client left), another may be sent."""
        return replace(self, probing=False) if self.probing else self

    def ok(self, now: float) -> "Breaker":
        """The node answered. While open this is the late answer to an old question, and changes nothing."""
        if self.state(now) == "open" and not self.probing:
            return self
        return Breaker(wary_until=self.wary_until)

    def fault(self, now: float, failures: int, reset_secs: float) -> "Breaker":
        """The transport failed; `failures` in a row open the breaker, and so does one while it is half-open."""
        wary_until = max(self.wary_until, now + WARY_SECS)
        if self.state(now) == "open" and not self.probing:
            return replace(self, wary_until=wary_until)
        faults = self.faults + 1
        if self.open_until is None and faults < failures:
            return replace(self, faults=faults, wary_until=wary_until)
        return Breaker(0, now + reset_secs, False, wary_until)

    def busy(self, now: float, secs: float) -> "Breaker":
        """The node refused because it has enough to do: others come first for `secs`."""
        return replace(self, wary_until=max(self.wary_until, now + secs))

    def changes_at(self, now: float) -> float:
        """When it changes by mere passing of time; infinity for never."""
        times = [self.wary_until]
        if self.open_until is not None and not self.probing:
            times.append(self.open_until)
        return min((time for time in times if time > now), default=inf)

    def blank(self, now: float) -> bool:
        """Whether there is nothing to remember."""
        return self.faults == 0 and self.open_until is None and self.wary_until <= now


_BLANK = Breaker()


class Breakers:
    """The breakers of a fleet. Only pairs with something to remember take room."""

    def __init__(self, failures: int, reset_secs: float) -> None:
        self.failures = failures
        self.reset_secs = reset_secs
        self._breakers: dict[Pair, Breaker] = {}

    def __contains__(self, pair: Pair) -> bool:
        return pair in self._breakers

    def began(self, pair: Pair, now: float) -> bool:
        """A request sets out; True when it is the probe, which `ended` must be told of."""
        before = self._breakers.get(pair)
        if before is None:
            return False
        after = before.began(now)
        self._put(pair, after, now)
        return after.probing and not before.probing

    def ended(self, pair: Pair, now: float) -> None:
        """The probe is over, whatever came of it."""
        self._put(pair, self._breakers.get(pair, _BLANK).ended(), now)

    def ok(self, pair: Pair, now: float) -> None:
        """The node answered."""
        self._put(pair, self._breakers.get(pair, _BLANK).ok(now), now)

    def fault(self, pair: Pair, now: float) -> State:
        """The transport failed; the state that this led to."""
        breaker = self._breakers.get(pair, _BLANK).fault(now, self.failures, self.reset_secs)
        self._put(pair, breaker, now)
        return breaker.state(now)

    def busy(self, pair: Pair, now: float, secs: float) -> None:
        """The node has enough to do for now."""
        self._put(pair, self._breakers.get(pair, _BLANK).busy(now, secs), now)

    def open(self, now: float) -> frozenset[Pair]:
        """Pairs that are not to be asked."""
        return frozenset(pair for pair, breaker in self._breakers.items() if breaker.state(now) == "open")

    def wary(self, now: float) -> frozenset[Pair]:
        """Pairs to be asked only when no other can be."""
        return frozenset(pair for pair, breaker in self._breakers.items() if breaker.wary_until > now)

    def changes_at(self, now: float) -> float:
        """When `open` or `wary` change by mere passing of time; infinity for never."""
        return min((breaker.changes_at(now) for breaker in self._breakers.values()), default=inf)

    def keep(self, wanted: Callable[[Pair], bool]) -> None:
        """Forget the pairs that are not wanted any more."""
        self._breakers = {pair: breaker for pair, breaker in self._breakers.items() if wanted(pair)}

    def _put(self, pair: Pair, breaker: Breaker, now: float) -> None:
        if breaker.blank(now):
            self._breakers.pop(pair, None)
        else:
            self._breakers[pair] = breaker
