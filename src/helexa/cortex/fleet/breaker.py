"""Circuit breakers and ejections: nodes that keep failing get no or few requests.

Circuit breakers: a pair of node and model that keeps failing gets no requests. Only transport failures count: a failed
connection, a reset, a timeout on a node whose polls fail too, or a response that is not HTTP. The requests of one
client may be the cause of the failures, for example if they crash a backend. Each client therefore has its own breaker
of a pair. The pair's breaker for all clients opens only if requests of two clients failed in a row, or if the node's
polls fail too. After a response with status 429 or 503, the router prefers other nodes for a short time.

Ejections: a node is at fault for an error response if another node has answered the same request well. Each such
*strike* ejects the (node, model) pair: for a while, the router prefers other nodes. Then the pair gets one request at a
time as a trial. A failed trial doubles the time of the next ejection. A good response takes one strike back. No request
fails because of an ejection: an ejected pair still gets requests if no other node can serve them.

* An error in a request's content, such as a 400, is usually the client's. But if a pair has rejected the last
  `MAX_REJECTIONS` requests to a path, it is suspect: requests that it rejects are then tried on another node, too.
* A request may contain something that only this node cannot process. A strike therefore ejects the pair only for
  requests of the same client to the same API path. If requests of two clients give strikes, without a good response to
  another client in between, the pair is ejected for all clients of the path.

No function in this module reads a clock: callers pass the time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, NamedTuple

Pair = tuple[str, str]  # node name and model id

ANY = ""  # stands for all clients, where a client is expected

Key = tuple[str, str, str]  # node name, model id, and the client, or `ANY`

State = Literal["closed", "open", "half-open"]

COOLDOWN_SECS = 1.0
# There is a breaker per node, model and client. Above this number, the oldest breakers of single clients are dropped.
MAX_BREAKERS = 1024

FIRST_EJECTION_SECS = 1.0
MAX_REJECTIONS = 2
MAX_STRIKES = 6  # ejections of 1, 2, 4, 8, 16, 32 seconds
MAX_EJECTIONS = 1024


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
        """Return the state: only a closed breaker allows more than one request."""
        if self.open_until is None:
            return "closed"
        return "open" if self.probing or now < self.open_until else "half-open"

    def began(self, now: float) -> "Breaker":
        """Return the breaker as it is after the start of a request."""
        # The first request of a half-open breaker is its probe, and no other request is sent until the probe ends.
        return replace(self, probing=True) if self.state(now) == "half-open" else self

    def ended(self) -> "Breaker":
        """Return the breaker as it is after the end of the probe request."""
        # If the probe ended without a result (neither `ok` nor `failed` was called), another probe is allowed.
        return replace(self, probing=False) if self.probing else self

    def ok(self, now: float) -> "Breaker":
        """Return the breaker after a response of the node: closed, without failures."""
        if self.state(now) == "open" and not self.probing:
            return self  # the request was sent before the breaker opened
        return Breaker(cooldown_until=self.cooldown_until)

    def failed(
        self, now: float, max_failures: int, reset_secs: float, client: str = ANY, *, alone: bool = True
    ) -> "Breaker":
        """Return the breaker as it is after a transport failure.

        Args:
            max_failures: number of consecutive failures that open a closed breaker. A half-open breaker opens after one
                failure.
            reset_secs: seconds until an opened breaker becomes half-open.
            alone: True if the failures of one client may open the breaker.
        """
        cooldown_until = max(self.cooldown_until, now + COOLDOWN_SECS)
        # A request from before the breaker opened must not open it for longer.
        if self.state(now) == "open" and not self.probing:
            return replace(self, cooldown_until=cooldown_until)
        failures, shared = self.failures + 1, self.shared or (self.failures > 0 and client != self.last_client)
        # Failures of a single client may be caused by its requests.
        if self.open_until is None and (failures < max_failures or not (alone or shared)):
            return replace(self, failures=failures, last_client=client, shared=shared, cooldown_until=cooldown_until)
        return Breaker(open_until=now + reset_secs, cooldown_until=cooldown_until)

    def busy(self, now: float, secs: float) -> "Breaker":
        """Return the breaker after a 429 or 503: other nodes are preferred for `secs`."""
        return replace(self, cooldown_until=max(self.cooldown_until, now + secs))

    def changes_at(self, now: float) -> float:
        """Return the next time at which the state changes by itself, or infinity."""
        change_times = [self.cooldown_until]
        if self.open_until is not None and not self.probing:
            change_times.append(self.open_until)
        return min((change_time for change_time in change_times if change_time > now), default=inf)

    def blank(self, now: float) -> bool:
        """Return whether the breaker is like a new one, and need not be stored."""
        return self.failures == 0 and self.open_until is None and self.cooldown_until <= now


_BLANK = Breaker()


class Breakers:
    """The breakers of all (node, model) pairs, for single clients and for all."""

    def __init__(self, failures: int, reset_secs: float) -> None:
        self.failures = failures
        self.reset_secs = reset_secs
        self._breakers: dict[Key, Breaker] = {}

    def __bool__(self) -> bool:
        return bool(self._breakers)

    def __contains__(self, pair: Pair) -> bool:
        return (*pair, ANY) in self._breakers

    def began(self, pair: Pair, now: float, client: str = ANY) -> tuple[Key, ...]:
        """Record the start of a request, and return the breakers that it probes.

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

        Return whether a breaker was stored for the request.
        """
        keys = [key for key in _keys(pair, client) if key in self._breakers]
        for key in keys:
            self._put(key, self._breakers[key].ok(now), now)
        return bool(keys)

    def failed(self, pair: Pair, now: float, client: str = ANY, *, alone: bool = True) -> State:
        """Record a transport failure, and return the state of the pair for all clients.

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
        """Return the open breakers: the node gets none of the client's requests."""
        return frozenset(key for key, breaker in self._breakers.items() if breaker.state(now) == "open")

    def cooling_down(self, now: float) -> frozenset[Pair]:
        """Return the pairs that failed or were busy within the last seconds."""
        return frozenset(
            (node, model)
            for (node, model, client), breaker in self._breakers.items()
            if client == ANY and breaker.cooldown_until > now
        )

    def changes_at(self, now: float) -> float:
        """Return when `open` or `cooling_down` changes by itself next, or infinity."""
        return min((breaker.changes_at(now) for breaker in self._breakers.values()), default=inf)

    def keep(self, wanted: Callable[[Pair], bool]) -> None:
        """Drop the state of all pairs for which `wanted` returns False."""
        self._breakers = {key: breaker for key, breaker in self._breakers.items() if wanted(key[:2])}

    def _put(self, key: Key, breaker: Breaker, now: float) -> None:
        self._breakers.pop(key, None)  # the dict is in the order of the last changes
        if not breaker.blank(now):
            self._breakers[key] = breaker
            # The breakers for all clients stay: there is one for each pair, and clients must not push them out.
            of_clients = (key for key in self._breakers if key[2] != ANY)
            if len(self._breakers) > MAX_BREAKERS and (oldest := next(of_clients, None)) is not None:
                del self._breakers[oldest]


def _keys(pair: Pair, client: str) -> tuple[Key, ...]:
    return ((*pair, ANY),) if client == ANY else ((*pair, ANY), (*pair, client))


class Requester(NamedTuple):
    """The source of a request, as far as it matters for the choice of a node."""

    client: str = ANY  # the account of the request, or the address of an anonymous client. `ANY` if unknown.
    path: str = ""


ANYONE = Requester()
EjectionKey = tuple[Pair, Requester]


@dataclass(frozen=True)
class Ejection:
    """Strikes of a (node, model) pair, for one client or all, on one API path.

    All times are seconds of the same clock. Each change returns a new `Ejection`.
    """

    strikes: int = 0  # number of strikes that were not taken back
    accuser: str = ANY  # client whose request gave the last strike
    until: float = -inf  # end of the ejection
    trying: bool = False  # True while a trial request is in progress

    def ejected(self, now: float) -> bool:
        """Return whether the router prefers other nodes.

        Between ejections, this is the case during a trial.
        """
        return self.trying or now < self.until

    def began(self, now: float) -> "Ejection":
        """Return the state after the start of a request.

        It is a trial if the pair had strikes and is not ejected.
        """
        return replace(self, trying=True) if self.strikes and not self.ejected(now) else self

    def struck(self, client: str, now: float) -> "Ejection":
        """Return the state after a strike.

        During an ejection, only the failure of the trial counts.
        """
        if now < self.until:
            return self
        strikes = min(self.strikes + 1, MAX_STRIKES)
        return Ejection(strikes, client, now + FIRST_EJECTION_SECS * 2 ** (strikes - 1))

    def served(self) -> "Ejection":
        """Return the state after a good response, which takes one strike back."""
        return Ejection(max(0, self.strikes - 1), self.accuser)


class Ejections:
    """The ejections of all (node, model) pairs of a fleet."""

    def __init__(self) -> None:
        self._ejections: dict[EjectionKey, Ejection] = {}
        self._rejections: dict[tuple[Pair, str], int] = {}

    def __bool__(self) -> bool:
        return bool(self._ejections or self._rejections)

    def began(self, pair: Pair, requester: Requester, now: float) -> tuple[EjectionKey, ...]:
        """Record the start of a request, and return the keys whose trial is this request.

        The caller must pass these keys to `ended` after the request.
        """
        trials: list[EjectionKey] = []
        for key in _ejection_keys(pair, requester):
            ejection = self._ejections.get(key)
            if ejection is not None and (begun := ejection.began(now)) is not ejection:
                self._put(key, begun)
                trials.append(key)
        return tuple(trials)

    def ended(self, keys: Iterable[EjectionKey]) -> None:
        """Record the end of the trial request of each key, with or without a result."""
        for key in keys:
            if key in self._ejections:
                self._put(key, replace(self._ejections[key], trying=False))

    def struck(self, pair: Pair, requester: Requester, now: float) -> bool:
        """Record a strike: another node answered the same request well.

        Return whether the strike began an ejection for all clients of the path.
        """
        client = requester.client
        if client != ANY:
            key = (pair, requester)
            self._put(key, self._ejections.get(key, Ejection()).struck(client, now))
        key = (pair, requester._replace(client=ANY))
        ejection = self._ejections.get(key, Ejection())
        if client != ANY and ejection.accuser in (ANY, client) and not ejection.strikes:
            self._put(key, replace(ejection, accuser=client))  # one client's requests alone eject for nobody else
            return False
        self._put(key, struck := ejection.struck(client, now))
        return struck is not ejection

    def rejected(self, pair: Pair, path: str) -> bool:
        """Record an error about a request's content; return whether it is suspect.

        The pair is suspect if it has rejected more than `MAX_REJECTIONS` requests to the path in a row.
        """
        rejections = self._rejections[pair, path] = min(self._rejections.get((pair, path), 0), MAX_REJECTIONS) + 1
        return rejections > MAX_REJECTIONS

    def served(self, pair: Pair, requester: Requester) -> bool:
        """Record a good response; return whether a strike or accusation was taken back."""
        self._rejections.pop((pair, requester.path), None)
        changed = False
        for key in _ejection_keys(pair, requester):
            ejection = self._ejections.get(key)
            # An accusation without a strike is taken back only by a good response to another client.
            if ejection is not None and (ejection.strikes or ejection.accuser != requester.client):
                self._put(key, ejection.served() if ejection.strikes > 1 else Ejection())
                changed = True
        return changed

    def ejected(self, now: float) -> frozenset[EjectionKey]:
        """Return the keys for whose requests the router prefers other nodes."""
        return frozenset(key for key, ejection in self._ejections.items() if ejection.ejected(now))

    def changes_at(self, now: float) -> float:
        """Return the next time at which `ejected` changes by itself, or infinity."""
        return min((ejection.until for ejection in self._ejections.values() if ejection.until > now), default=inf)

    def keep(self, wanted: Callable[[Pair], bool]) -> None:
        """Drop the state of all pairs for which `wanted` returns False."""
        self._ejections = {key: ejection for key, ejection in self._ejections.items() if wanted(key[0])}
        self._rejections = {key: count for key, count in self._rejections.items() if wanted(key[0])}

    def _put(self, key: EjectionKey, ejection: Ejection) -> None:
        self._ejections.pop(key, None)  # the dict is in the order of the last changes
        if ejection != Ejection():
            self._ejections[key] = ejection
            # The ejections for all clients stay: clients must not push them out.
            of_clients = (key for key in self._ejections if key[1].client != ANY)
            if len(self._ejections) > MAX_EJECTIONS and (oldest := next(of_clients, None)) is not None:
                del self._ejections[oldest]


def _ejection_keys(pair: Pair, requester: Requester) -> tuple[EjectionKey, ...]:
    shared = (pair, requester._replace(client=ANY))
    return (shared,) if requester.client == ANY else (shared, (pair, requester))
