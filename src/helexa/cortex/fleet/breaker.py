"""Circuit breakers: nodes that keep failing get no requests.

There are breakers for each pair of a node and a model. Only transport failures count: a failed connection, a reset, a
timeout on a node whose polls fail too, or a response that is not HTTP. The requests of one client may be the cause of
the failures, for example if they crash a backend. Each client therefore has its own breaker for each pair. The pair's
breaker for all clients opens only if requests of at least two clients failed in a row, or if the node's polls fail too.
After a response with status 429 or 503, the router prefers other nodes for a short time.

No function in this module reads a clock: callers pass the time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

Pair = tuple[str, str]  # node name and model id

ANY = ""  # stands for all clients, in place of one client's name

Key = tuple[str, str, str]  # node name, model id, and the client, or `ANY`

State = Literal["closed", "open", "half-open"]

COOLDOWN_SECS = 1.0
# There is a breaker per node, model and client. Above this number, the breakers of single clients that have not changed
# for the longest time are dropped.
MAX_BREAKERS = 1024


@dataclass(frozen=True)
class Breaker:
    """Breaker state of one (node, model) pair, for one client or for all clients.

    The states are closed (requests allowed), open (no requests) and half-open (one probe request allowed). All times
    are seconds of the same clock. Each change returns a new `Breaker`.
    """

    failures: int = 0  # number of consecutive transport failures of a closed breaker
    last_client: str = ANY  # client of the last of these failures
    shared: bool = False  # True if requests of more than one client are among these failures
    open_until: float | None = None  # time at which an open breaker becomes half-open; None for a closed breaker
    probing: bool = False  # True while the probe request is in progress
    cooldown_until: float = -inf  # until this time the router prefers other nodes, because this node failed or was busy

    def state(self, now: float) -> State:
        """Return the state at the time `now`. While the probe runs, the state is open."""
        if self.open_until is None:
            return "closed"
        return "open" if self.probing or now < self.open_until else "half-open"

    def began(self, now: float) -> "Breaker":
        """Return a breaker with the state after the start of a request."""
        # The first request of a half-open breaker is its probe, and no other request is sent until the probe ends.
        return replace(self, probing=True) if self.state(now) == "half-open" else self

    def ended(self) -> "Breaker":
        """Return a breaker with the state after the end of the probe request."""
        # If the probe ended without a result (neither `ok` nor `failed` was called), another probe is allowed.
        return replace(self, probing=False) if self.probing else self

    def ok(self, now: float) -> "Breaker":
        """Return the breaker after a response: closed, unless it is open without a probe."""
        if self.state(now) == "open" and not self.probing:
            return self  # the request was sent before the breaker opened
        return Breaker(cooldown_until=self.cooldown_until)

    def failed(
        self, now: float, max_failures: int, reset_secs: float, client: str = ANY, *, alone: bool = True
    ) -> "Breaker":
        """Return a breaker with the state after a transport failure.

        If the breaker is open without a probe, only its cooldown changes.

        Args:
            max_failures: number of consecutive failures that open a closed breaker. A half-open breaker opens after one
                failure.
            reset_secs: seconds until an opened breaker becomes half-open.
            alone: True if the failures of one client may open a closed breaker.
        """
        cooldown_until = max(self.cooldown_until, now + COOLDOWN_SECS)
        # This request began before the breaker opened. Its failure must not prolong the open state.
        if self.state(now) == "open" and not self.probing:
            return replace(self, cooldown_until=cooldown_until)
        failures, shared = self.failures + 1, self.shared or (self.failures > 0 and client != self.last_client)
        # One client may cause failures by its requests. Unless `alone` is true, its failures do not open the breaker.
        if self.open_until is None and (failures < max_failures or not (alone or shared)):
            return replace(self, failures=failures, last_client=client, shared=shared, cooldown_until=cooldown_until)
        return Breaker(open_until=now + reset_secs, cooldown_until=cooldown_until)

    def busy(self, now: float, secs: float) -> "Breaker":
        """Return the breaker after a 429 or 503: other nodes are preferred for `secs`."""
        return replace(self, cooldown_until=max(self.cooldown_until, now + secs))

    def changes_at(self, now: float) -> float:
        """Return when state or cooldown next change by themselves; infinity if never."""
        change_times = [self.cooldown_until]
        if self.open_until is not None and not self.probing:
            change_times.append(self.open_until)
        return min((change_time for change_time in change_times if change_time > now), default=inf)

    def blank(self, now: float) -> bool:
        """Return whether the breaker is like a new one, and need not be stored."""
        return self.failures == 0 and self.open_until is None and self.cooldown_until <= now


_BLANK = Breaker()


class Breakers:
    """The breakers of all (node, model) pairs, for each client and for all clients."""

    def __init__(self, failures: int, reset_secs: float) -> None:
        self.failures = failures
        self.reset_secs = reset_secs
        self._breakers: dict[Key, Breaker] = {}

    def __bool__(self) -> bool:
        return bool(self._breakers)

    def __contains__(self, pair: Pair) -> bool:
        return (*pair, ANY) in self._breakers

    def began(self, pair: Pair, now: float, client: str = ANY) -> tuple[Key, ...]:
        """Record the start of a request; return keys of the breakers that it probes.

        The caller must pass these keys to `ended` after the request.
        """
        probed: list[Key] = []
        for key in _keys(pair, client):
            breaker = self._breakers.get(key)
            if breaker is not None:
                after_request = breaker.began(now)
                self._put(key, after_request, now)
                if after_request.probing and not breaker.probing:
                    probed.append(key)
        return tuple(probed)

    def ended(self, keys: Iterable[Key], now: float) -> None:
        """Record the end of the probes of `keys`, with or without a response."""
        for key in keys:
            self._put(key, self._breakers.get(key, _BLANK).ended(), now)

    def ok(self, pair: Pair, now: float, client: str = ANY) -> bool:
        """Record that the node responded to a request for the model, with any status.

        Return whether a breaker for the pair was stored, so its state may have changed.
        """
        keys = [key for key in _keys(pair, client) if key in self._breakers]
        for key in keys:
            self._put(key, self._breakers[key].ok(now), now)
        return bool(keys)

    def failed(self, pair: Pair, now: float, client: str = ANY, *, alone: bool = True) -> State:
        """Record a transport failure; return the state of the breaker for all clients.

        Args:
            alone: True if the failures of one client may open the breaker for all clients.
        """
        for key in _keys(pair, client):
            breaker = self._breakers.get(key, _BLANK)
            # The breaker of one client may open after failures of this client only.
            breaker = breaker.failed(now, self.failures, self.reset_secs, client, alone=alone or key[2] != ANY)
            self._put(key, breaker, now)
        return self._breakers.get((*pair, ANY), _BLANK).state(now)

    def busy(self, pair: Pair, now: float, secs: float) -> None:
        """Record a 429 or 503: the router prefers other nodes for `secs` seconds."""
        self._put((*pair, ANY), self._breakers.get((*pair, ANY), _BLANK).busy(now, secs), now)

    def open(self, now: float) -> frozenset[Key]:
        """Return the keys of the open breakers: the node gets no requests of the client."""
        return frozenset(key for key, breaker in self._breakers.items() if breaker.state(now) == "open")

    def cooling_down(self, now: float) -> frozenset[Pair]:
        """Return the pairs whose cooldown after a failure, a 429 or a 503 has not ended."""
        return frozenset(
            (node, model)
            for (node, model, client), breaker in self._breakers.items()
            if client == ANY and breaker.cooldown_until > now
        )

    def changes_at(self, now: float) -> float:
        """Return when `open` or `cooling_down` changes by itself next; infinity if never."""
        return min((breaker.changes_at(now) for breaker in self._breakers.values()), default=inf)

    def keep(self, wanted: Callable[[Pair], bool]) -> None:
        """Drop the state of all pairs for which `wanted` returns False."""
        self._breakers = {key: breaker for key, breaker in self._breakers.items() if wanted(key[:2])}

    def _put(self, key: Key, breaker: Breaker, now: float) -> None:
        # The breaker is removed and inserted again, so that the dictionary is in the order of the last changes.
        self._breakers.pop(key, None)
        if not breaker.blank(now):
            self._breakers[key] = breaker
            # Only breakers of single clients are dropped. Breakers for all clients stay: their number is limited by the
            # number of pairs, and many clients must not displace them.
            of_clients = (key for key in self._breakers if key[2] != ANY)
            if len(self._breakers) > MAX_BREAKERS and (oldest := next(of_clients, None)) is not None:
                del self._breakers[oldest]


def _keys(pair: Pair, client: str) -> tuple[Key, ...]:
    return ((*pair, ANY),) if client == ANY else ((*pair, ANY), (*pair, client))
