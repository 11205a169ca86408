"""Admission gate of one model: a state machine without a clock. Tickets arrive, wait, are admitted and leave.

A request gets its slot and its memory at the same moment, and waiting requests hold neither. Requests therefore cannot
deadlock over slots and memory.

Principals take turns. A turn costs the memory of the request, so principals with large requests get fewer turns. A new
principal starts without debt. If there are at least `_MANY_SEATS` slots, one principal can hold all slots but one.
Anonymous requests count as one principal; they are admitted only if no request with a principal waits.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

ANONYMOUS = ""

_MANY_SEATS = 8
_PASSES = 16  # how many smaller requests may be admitted ahead of a request that waits for memory
_LOOK_SECONDS = 0.25  # interval of checks for memory that was freed without notice
_RATE_SECONDS = 60.0
_RATE_SEATS = 64
_FIRST_RATE = 2.0  # assumed seconds per freed slot, until a slot is freed
_LONGEST_RETRY = 120


class Reason(StrEnum):
    """Reasons for rejecting a request."""

    QUEUE_FULL = "queue_full"
    TIMEOUT = "timeout"
    PER_PRINCIPAL = "per_principal"
    ANON_YIELD = "anon_yield"
    KV_TIMEOUT = "kv_timeout"
    KV_UNSERVABLE = "kv_unservable"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one model.

    Attributes:
        seats: number of admitted requests.
        queue: number of waiting requests.
        wait, kv_wait: longest wait for a slot, and longest wait for memory after that, in seconds.
        per_principal: number of admitted and waiting requests of one principal; 0 for no limit.
        anon_seats, anon_pending: number of admitted anonymous requests, and number of admitted and waiting anonymous
            requests. 0 `anon_seats` rejects all anonymous requests.
        pages: number of KV pages in total.
    """

    seats: int
    queue: int
    wait: float
    kv_wait: float
    per_principal: int
    anon_seats: int
    anon_pending: int
    pages: int

    @property
    def share(self) -> int:
        """Return the number of slots that one principal may hold."""
        return share_of(self.seats)


def share_of(seats: int) -> int:
    """Return how many of `seats` slots one principal may hold."""
    return seats - 1 if seats >= _MANY_SEATS else seats


@dataclass(eq=False, kw_only=True)
class Ticket:
    """One request at the gate.

    Attributes:
        principal: principal of the request; `ANONYMOUS` if it has none.
        pages: KV pages reserved at admission.
        least: fewest KV pages with which the request can be served.
        refused: reason for the rejection, or None.
        number: position in the order of arrival.
        deadline: time at which the request stops waiting.
        starved: the request's turn came, but its memory was not free.
        passed: number of later requests admitted ahead of this one since then.
        held: KV pages that the engine holds for the request.
    """

    principal: str
    pages: int
    least: int
    waiting: bool = False
    inside: bool = False
    refused: Reason | None = None
    number: int = 0
    deadline: float = math.inf
    starved: bool = False
    passed: int = 0
    held: int = 0

    @property
    def owed(self) -> int:
        """Return the number of pages reserved but not yet held by the engine."""
        return max(self.pages - self.held, 0)

    @property
    def claimed(self) -> int:
        """Return the number of pages reserved, or the number of pages held if that is larger."""
        return max(self.pages, self.held)


class Gate:
    """Decides which requests are admitted.

    Methods that may settle tickets return the settled tickets, each either admitted or rejected.

    Attributes:
        free: free KV pages at the last report of the engine.
        waiting, inside: number of waiting requests, and of admitted requests.
        refusals: number of rejections by reason.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.free = limits.pages
        self.waiting = 0
        self.inside = 0
        self.refusals = dict.fromkeys(Reason, 0)
        self._lines: dict[str, deque[Ticket]] = {}  # waiting tickets by principal
        self._seated: dict[str, int] = {}
        self._turns: dict[str, float] = {}  # cost of the turns that each present principal has had
        self._turn = 0.0  # starting value for new principals
        self._promised = 0  # pages reserved but not reported as held
        self._claimed = 0  # pages of admitted requests, held or reserved
        self._arrived = 0
        self._freed: deque[float] = deque(maxlen=_RATE_SEATS)

    @property
    def available(self) -> int:
        """Return the number of pages available to the next request."""
        # The engine reports a prompt's pages only with its first token. Until then the first difference counts these
        # pages twice. The second difference ignores pages that several requests share.
        return max(self.free - self._promised, self.limits.pages - self._claimed, 0)

    def seated(self, principal: str) -> int:
        """Return the number of admitted requests of `principal`."""
        return self._seated.get(principal, 0)

    def arrive(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Add a request. The gate admits it, queues it, or rejects it or another request in its place."""
        limits, who = self.limits, ticket.principal
        pending = self.seated(who) + len(self._lines.get(who, ()))
        if ticket.least > limits.pages:
            return [self._refuse(ticket, Reason.KV_UNSERVABLE)]
        if limits.per_principal and who != ANONYMOUS and pending >= limits.per_principal:
            return [self._refuse(ticket, Reason.PER_PRINCIPAL)]
        if who == ANONYMOUS and (not limits.anon_seats or pending >= limits.anon_pending):
            return [self._refuse(ticket, Reason.ANON_YIELD)]
        self._arrived += 1
        ticket.number, ticket.deadline = self._arrived, now + limits.wait
        ticket.pages = min(ticket.pages, limits.pages)
        if who not in self._lines:
            self._turns[who] = max(self._turns.get(who, 0.0), self._turn)
        self._lines.setdefault(who, deque()).append(ticket)
        ticket.waiting = True
        self.waiting += 1
        settled = self._admit(now)
        if self.waiting > limits.queue:
            settled.append(self._push_out(ticket))
        return settled

    def leave(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Remove a request that ended or stopped waiting. Each request that arrived must leave once."""
        if ticket.inside:
            ticket.inside = False
            self.inside -= 1
            self._seated[ticket.principal] -= 1
            self._promised -= ticket.owed
            self._claimed -= ticket.claimed
            self._freed.append(now)
        elif ticket.waiting:
            self._step_out(ticket)
        # forget principals without requests
        if ticket.principal not in self._lines and not self.seated(ticket.principal):
            self._seated.pop(ticket.principal, None)
            self._turns.pop(ticket.principal, None)
        return self._admit(now)

    def hold(self, ticket: Ticket, pages: int) -> None:
        """Record that the engine holds `pages` pages for an admitted request."""
        if ticket.inside and pages > ticket.held:
            self._promised -= ticket.owed
            self._claimed -= ticket.claimed
            ticket.held = pages
            self._promised += ticket.owed
            self._claimed += ticket.claimed

    def tick(self, now: float) -> list[Ticket]:
        """Admit and expire requests after time passed or memory was freed."""
        settled = self._admit(now)
        for ticket in [ticket for ticket in self._waiters() if ticket.deadline <= now]:
            self._step_out(ticket)
            settled.append(self._refuse(ticket, Reason.KV_TIMEOUT if ticket.starved else Reason.TIMEOUT))
        return settled + self._admit(now)

    def next_tick(self, now: float) -> float | None:
        """Return the time of the next necessary `tick`, or None."""
        if not self.waiting:
            return None
        deadline = min(ticket.deadline for ticket in self._waiters())
        return min(deadline, now + _LOOK_SECONDS) if any(t.starved for t in self._waiters()) else deadline

    def retry_after(self, now: float) -> int:
        """Return whole seconds until the gate could probably admit a request, from the recent rate of freed slots."""
        while self._freed and self._freed[0] < now - _RATE_SECONDS:
            self._freed.popleft()
        each = (now - self._freed[0]) / len(self._freed) if self._freed else _FIRST_RATE
        return min(max(math.ceil((self.waiting + 1) * each), 1), _LONGEST_RETRY)

    def close(self) -> list[Ticket]:
        """Remove all waiting requests and return them. The caller chooses their error."""
        waiters = list(self._waiters())
        for ticket in waiters:
            self._step_out(ticket)
        return waiters

    def _admit(self, now: float) -> list[Ticket]:
        """Admit all requests that fit, the first request of each principal in the order of turns."""
        admitted: list[Ticket] = []
        while self.inside < self.limits.seats and (ticket := self._next(now)) is not None:
            self._step_out(ticket)
            ticket.inside = True
            self.inside += 1
            self._seated[ticket.principal] = self.seated(ticket.principal) + 1
            self._promised += ticket.owed
            self._claimed += ticket.claimed
            turn = self._turns[ticket.principal]
            self._turns[ticket.principal] = turn + ticket.pages
            # The starting value grows with each admission, so newcomers cannot delay a waiting principal forever.
            self._turn = max(self._turn, turn) + ticket.pages / len(self._turns)
            admitted.append(ticket)
        return admitted

    def _next(self, now: float) -> Ticket | None:
        """Return the next request in the order of turns whose memory is available."""
        known = [line[0] for who, line in self._lines.items() if line and who != ANONYMOUS]
        anonymous = self._lines.get(ANONYMOUS)
        heads = known or ([anonymous[0]] if anonymous else [])
        behind: list[Ticket] = []
        for ticket in sorted(heads, key=lambda ticket: (self._turns[ticket.principal], ticket.number)):
            if self.seated(ticket.principal) >= self._ceiling(ticket.principal):
                continue
            if not self.inside or ticket.pages <= self.available:
                for other in behind:
                    other.passed += 1
                return ticket
            if not ticket.starved:
                ticket.starved, ticket.deadline = True, now + self.limits.kv_wait
            if ticket.passed >= _PASSES:
                return None
            behind.append(ticket)
        return None

    def _ceiling(self, principal: str) -> int:
        return self.limits.anon_seats if principal == ANONYMOUS else self.limits.share

    def _push_out(self, newcomer: Ticket) -> Ticket:
        """Reject one request of an overlong queue: the newest anonymous request, else the newest of the principal with
        most requests.
        """
        anonymous = self._lines.get(ANONYMOUS)
        if anonymous and newcomer.principal != ANONYMOUS:
            victim, reason = anonymous[-1], Reason.ANON_YIELD
        elif newcomer.principal == ANONYMOUS:
            victim, reason = newcomer, Reason.QUEUE_FULL
        else:
            longest = max(self._lines, key=lambda who: (len(self._lines[who]), who == newcomer.principal))
            victim, reason = self._lines[longest][-1], Reason.QUEUE_FULL
        self._step_out(victim)
        return self._refuse(victim, reason)

    def _refuse(self, ticket: Ticket, reason: Reason) -> Ticket:
        ticket.refused = reason
        self.refusals[reason] += 1
        return ticket

    def _step_out(self, ticket: Ticket) -> None:
        """Remove a ticket from its principal's queue."""
        line = self._lines[ticket.principal]
        line.remove(ticket)
        if not line:
            del self._lines[ticket.principal]
        ticket.waiting = False
        self.waiting -= 1

    def _waiters(self) -> Iterator[Ticket]:
        for line in self._lines.values():
            yield from line
