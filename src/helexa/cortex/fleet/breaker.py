"""Circuit breakers: a (node, model) pair that keeps failing gets no requests for a while, then one probe request.

Only transport failures count: a failed connection, a reset, a timeout on a node whose polls fail too, or a response
that is not HTTP. A node's error response does not count. A timeout on a node that answers its polls does not count.

After a response with status 429 or 503, the router prefers other nodes for a short time. No function in this module
reads a clock: callers pass the time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

Pair = tuple[str, str]
"""Node name and model id."""

State = Literal["closed", "open", "half-open"]

WARY_SECS = 1.0


@dataclass(frozen=True)
class Breaker:
    """Breaker state of one (node, model) pair.

    The states are closed (requests allowed), open (no requests) and half-open (one probe request allowed). The class is
    immutable: each change returns a new `Breaker`. All times are seconds of the same clock.

    Attributes:
        failures: number of consecutive transport failures of a closed breaker.
        open_until: time at which an open breaker becomes half-open; None for a closed breaker.
        probing: True while the probe request is in progress.
        wary_until: until this time the router prefers other nodes, because this node failed or was busy.
    """

    failures: int = 0
    open_until: float | None = None
    probing: bool = False
    wary_until: float = -inf

    def state(self, now: float) -> State:
        """Return `closed` (requests allowed), `open` (no requests) or `half-open` (one probe request allowed)."""
        if self.open_until is None:
            return "closed"
        return "open" if self.probing or now < self.open_until else "half-open"

    def began(self, now: float) -> "Breaker":
        """Return the breaker as it is after the start of a request. If it was half-open, the request is the probe."""
        return replace(self, probing=True) if self.state(now) == "half-open" else self

    def ended(self) -> "Breaker":
        """Return the breaker as it is after the end of the probe request.

        If the probe ended without a result (neither `ok` nor `failed` was called), another probe is allowed.
        """
        return replace(self, probing=False) if self.probing else self

    def ok(self, now: float) -> "Breaker":
        """Return the breaker as it is after a response of the node: closed, without counted failures.

        An open breaker without a running probe does not change, because the response belongs to a request that was sent
        before the breaker opened.
        """
        if self.state(now) == "open" and not self.probing:
            return self
        return Breaker(wary_until=self.wary_until)

    def failed(self, now: float, max_failures: int, reset_secs: float) -> "Breaker":
        """Return the breaker as it is after a transport failure.

        Args:
            now: current time in seconds.
            max_failures: number of consecutive failures that open a closed breaker. A half-open breaker opens after one
                failure.
            reset_secs: seconds until an opened breaker becomes half-open.
        """
        wary_until = max(self.wary_until, now + WARY_SECS)
        if self.state(now) == "open" and not self.probing:
            return replace(self, wary_until=wary_until)
        failures = self.failures + 1
        if self.open_until is None and failures < max_failures:
            return replace(self, failures=failures, wary_until=wary_until)
        return Breaker(0, now + reset_secs, False, wary_until)

    def busy(self, now: float, secs: float) -> "Breaker":
        """Return the breaker as it is after a 429 or 503: the router prefers other nodes for `secs` seconds."""
        return replace(self, wary_until=max(self.wary_until, now + secs))

    def changes_at(self, now: float) -> float:
        """Return the next time at which the breaker changes merely because time passes; infinity if never."""
        change_times = [self.wary_until]
        if self.open_until is not None and not self.probing:
            change_times.append(self.open_until)
        return min((change_time for change_time in change_times if change_time > now), default=inf)

    def blank(self, now: float) -> bool:
        """Return whether the breaker behaves like a new breaker, and therefore need not be stored."""
        return self.failures == 0 and self.open_until is None and self.wary_until <= now


_BLANK = Breaker()


class Breakers:
    """The breakers of all (node, model) pairs of a fleet.

    A pair without a stored breaker has a new breaker: closed, without failures.
    """

    def __init__(self, failures: int, reset_secs: float) -> None:
        self.failures = failures
        self.reset_secs = reset_secs
        self._breakers: dict[Pair, Breaker] = {}

    def __contains__(self, pair: Pair) -> bool:
        return pair in self._breakers

    def began(self, pair: Pair, now: float) -> bool:
        """Record the start of a request. Return True if the request is the probe of a half-open breaker.

        The caller must call `ended` after the probe.
        """
        breaker = self._breakers.get(pair)
        if breaker is None:
            return False
        after_request = breaker.began(now)
        self._put(pair, after_request, now)
        return after_request.probing and not breaker.probing

    def ended(self, pair: Pair, now: float) -> None:
        """Record the end of the pair's probe request, whether or not the node has responded."""
        self._put(pair, self._breakers.get(pair, _BLANK).ended(), now)

    def ok(self, pair: Pair, now: float) -> None:
        """Record that the node responded to a request for the model, with any status."""
        self._put(pair, self._breakers.get(pair, _BLANK).ok(now), now)

    def failed(self, pair: Pair, now: float) -> State:
        """Record a transport failure and return the new state of the pair's breaker."""
        breaker = self._breakers.get(pair, _BLANK).failed(now, self.failures, self.reset_secs)
        self._put(pair, breaker, now)
        return breaker.state(now)

    def busy(self, pair: Pair, now: float, secs: float) -> None:
        """Record a 429 or 503 of the node: the router prefers other nodes for `secs` seconds."""
        self._put(pair, self._breakers.get(pair, _BLANK).busy(now, secs), now)

    def open(self, now: float) -> frozenset[Pair]:
        """Return the pairs with an open breaker, which must get no requests."""
        return frozenset(pair for pair, breaker in self._breakers.items() if breaker.state(now) == "open")

    def wary(self, now: float) -> frozenset[Pair]:
        """Return the pairs that failed or were busy recently, for which the router prefers other nodes."""
        return frozenset(pair for pair, breaker in self._breakers.items() if breaker.wary_until > now)

    def changes_at(self, now: float) -> float:
        """Return the next time at which the result of `open` or `wary` changes because time passes, or infinity."""
        return min((breaker.changes_at(now) for breaker in self._breakers.values()), default=inf)

    def keep(self, wanted: Callable[[Pair], bool]) -> None:
        """Drop the state of all pairs for which `wanted` returns False."""
        self._breakers = {pair: breaker for pair, breaker in self._breakers.items() if wanted(pair)}

    def _put(self, pair: Pair, breaker: Breaker, now: float) -> None:
        if breaker.blank(now):
            self._breakers.pop(pair, None)
        else:
            self._breakers[pair] = breaker
