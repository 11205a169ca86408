"""Ejections: nodes that fail requests which other nodes serve get few requests.

If a node responds to a request with an error, and another node answers the same request well, the first node is at
fault. This is called a *strike*. A response that breaks off is a strike, too. A strike ejects the (node, model) pair:
for a while, the router prefers other nodes. Then the pair gets one request at a time as a trial. A failed trial doubles
the time of the next ejection. A good response takes one strike back. No request fails because of an ejection: an
ejected pair still gets requests if no other node can serve them.

* An error about a request's content, such as a 400, is usually the client's fault. But if a pair has rejected the last
  `MAX_REJECTIONS` requests to an API path, the pair is suspect: requests that it rejects are then tried on another
  node, too.
* A request may contain something that only this node cannot process. A strike therefore ejects the pair only for
  requests of the same client to the same API path. If requests of two clients give strikes, without a good response to
  another client in between, the pair is ejected for the requests of all clients to this path.

No function in this module reads a clock: callers pass the time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from helexa.cortex.fleet.breaker import ANY, Pair

FIRST_EJECTION_SECS = 1.0
MAX_REJECTIONS = 2
MAX_STRIKES = 6  # the ejections last 1, 2, 4, 8, 16 and 32 seconds
MAX_EJECTIONS = 1024


class Requester(NamedTuple):
    """Client and API path of a request. Each client and path has its own ejections."""

    client: str = ANY  # the account of the request, or the address of an anonymous client. `ANY` if unknown.
    path: str = ""


ANYONE = Requester()

EjectionKey = tuple[Pair, Requester]


@dataclass(frozen=True)
class Ejection:
    """Ejection of a (node, model) pair for one client or all clients, on one API path.

    All times are seconds of the same clock. Each change returns a new `Ejection`.
    """

    strikes: int = 0  # number of strikes that were not taken back
    # Client whose request gave the last strike. In an ejection for all clients, the first strike only sets this field
    # (an accusation). Only a strike by another client ejects the pair for all clients.
    accuser: str = ANY
    until: float = -inf  # end of the ejection
    trying: bool = False  # True while a trial request is in progress

    def ejected(self, now: float) -> bool:
        """Return whether the router prefers other nodes.

        This is the case during an ejection, and while a trial request is in progress.
        """
        return self.trying or now < self.until

    def began(self, now: float) -> "Ejection":
        """Return the state after the start of a request.

        The request is a trial if the pair has strikes and is not ejected.
        """
        return replace(self, trying=True) if self.strikes and not self.ejected(now) else self

    def struck(self, client: str, now: float) -> "Ejection":
        """Return the state after a strike.

        A strike during an ejection is ignored. The failure of the trial, which follows the ejection, counts.
        """
        if now < self.until:
            return self
        strikes = min(self.strikes + 1, MAX_STRIKES)
        return Ejection(strikes, client, now + FIRST_EJECTION_SECS * 2 ** (strikes - 1))

    def served(self) -> "Ejection":
        """Return the state after a good response: one strike less, and not ejected."""
        return Ejection(max(0, self.strikes - 1), self.accuser)


class Ejections:
    """The ejections of all (node, model) pairs of a fleet."""

    def __init__(self) -> None:
        self._ejections: dict[EjectionKey, Ejection] = {}
        self._rejections: dict[tuple[Pair, str], int] = {}

    def __bool__(self) -> bool:
        return bool(self._ejections or self._rejections)

    def began(self, pair: Pair, requester: Requester, now: float) -> tuple[EjectionKey, ...]:
        """Record a request's start, and return the ejection keys whose trial it is.

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
        """Record a strike: a failed request, for which the node is at fault.

        Return whether the strike began an ejection for the requests of all clients to `requester.path`.
        """
        client = requester.client
        if client != ANY:
            key = (pair, requester)
            self._put(key, self._ejections.get(key, Ejection()).struck(client, now))
        key = (pair, requester._replace(client=ANY))
        ejection = self._ejections.get(key, Ejection())
        if client != ANY and ejection.accuser in (ANY, client) and not ejection.strikes:
            # Strikes of one client eject the pair only for this client, so this strike is only an accusation.
            self._put(key, replace(ejection, accuser=client))
            return False
        self._put(key, struck := ejection.struck(client, now))
        return struck is not ejection

    def rejected(self, pair: Pair, path: str) -> bool:
        """Record an error about a request's content; return whether the pair is suspect.

        The pair is suspect if it has rejected more than `MAX_REJECTIONS` requests to the API path `path` in a row.
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
        """Return the pairs and requesters for which the router prefers other nodes."""
        return frozenset(key for key, ejection in self._ejections.items() if ejection.ejected(now))

    def changes_at(self, now: float) -> float:
        """Return when `ejected` changes by itself next; infinity if it does not."""
        return min((ejection.until for ejection in self._ejections.values() if ejection.until > now), default=inf)

    def keep(self, wanted: Callable[[Pair], bool]) -> None:
        """Drop the state of all pairs for which `wanted` returns False."""
        self._ejections = {key: ejection for key, ejection in self._ejections.items() if wanted(key[0])}
        self._rejections = {key: count for key, count in self._rejections.items() if wanted(key[0])}

    def _put(self, key: EjectionKey, ejection: Ejection) -> None:
        # The ejection is removed and inserted again, so that the dictionary is in the order of the last changes.
        self._ejections.pop(key, None)
        if ejection != Ejection():
            self._ejections[key] = ejection
            # Only ejections for single clients are dropped. Many clients must not displace ejections for all clients.
            of_clients = (key for key in self._ejections if key[1].client != ANY)
            if len(self._ejections) > MAX_EJECTIONS and (oldest := next(of_clients, None)) is not None:
                del self._ejections[oldest]


def _ejection_keys(pair: Pair, requester: Requester) -> tuple[EjectionKey, ...]:
    shared = (pair, requester._replace(client=ANY))
    return (shared,) if requester.client == ANY else (shared, (pair, requester))
