"""The gate in front of one model, as a state machine without a clock: tickets arrive, wait, go in and leave.

Whoever goes in takes a seat and memory at the same moment, and whoever waits holds nothing, so nobody can hold the one
while waiting for the other.

Principals take turns. A turn costs what the request takes of memory, so those who ask for much come less often; a
principal that comes anew owes nothing. Where there are many seats nobody holds all: the last one is for somebody else.
Anonymous callers are one principal, and go in only while nobody else waits.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

ANONYMOUS = ""

_MANY_SEATS = 8
_PASSES = 16  # how often a request that waits for memory is overtaken by smaller ones
_LOOK_SECONDS = 0.25  # between looks at memory that others may have given back unasked
_RATE_SECONDS = 60.0
_RATE_SEATS = 64
_FIRST_RATE = 2.0  # seconds until a seat comes free, as long as none has
_LONGEST_RETRY = 120


class Reason(StrEnum):
    """Why a request was turned away."""

    QUEUE_FULL = "queue_full"
    TIMEOUT = "timeout"
    PER_PRINCIPAL = "per_principal"
    ANON_YIELD = "anon_yield"
    KV_TIMEOUT = "kv_timeout"
    KV_UNSERVABLE = "kv_unservable"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The ceilings of one model.

    Attributes:
        seats: requests inside.
        queue: requests that wait.
        wait, kv_wait: seconds, for a seat, and then for memory.
        per_principal: requests of one principal, waiting ones included; 0 for no bound.
        anon_seats, anon_pending: anonymous requests inside, and waiting ones included; 0 seats refuse them all.
        pages: of memory in all.
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
        """Seats that one principal may hold."""
        return share_of(self.seats)


def share_of(seats: int) -> int:
    """How many of so many seats one principal may hold."""
    return seats - 1 if seats >= _MANY_SEATS else seats


@dataclass(eq=False, kw_only=True)
class Ticket:
    """One request at the gate.

    Attributes:
        pages: of memory that it goes in with.
        least: pages without which it can never be served.
        refused: why it was turned away, if it was.
        number: in the order of arrival.
        deadline: when it stops waiting.
        starved: its turn came, but not the memory.
        passed: how often others went in then.
        held: pages that it holds by now, so that they are missing from those that are free.
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
        """Pages that it was let in with and does not hold yet."""
        return max(self.pages - self.held, 0)

    @property
    def claimed(self) -> int:
        """Pages that it was let in with, or those that it holds if these are more."""
        return max(self.pages, self.held)


class Gate:
    """Decides who goes in. Every method that may settle tickets returns those it has settled: inside, or refused.

    Attributes:
        free: pages of memory that nobody holds, as last heard of.
        waiting, inside: how many.
        refusals: how many, by reason.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.free = limits.pages
        self.waiting = 0
        self.inside = 0
        self.refusals = dict.fromkeys(Reason, 0)
        self._lines: dict[str, deque[Ticket]] = {}  # who waits, by principal
        self._seated: dict[str, int] = {}
        self._turns: dict[str, float] = {}  # what each principal that is here has had
        self._turn = 0.0  # where a newcomer begins
        self._promised = 0  # pages of those inside that do not hold them yet, as far as was heard
        self._claimed = 0  # pages of those inside, held or promised
        self._arrived = 0
        self._freed: deque[float] = deque(maxlen=_RATE_SEATS)

    @property
    def available(self) -> int:
        """Pages that the next one may count on."""
        # What a prompt holds is not heard of before its first token: until then it is missing from the first of these
        # twice. The second does not know of pages that several share.
        return max(self.free - self._promised, self.limits.pages - self._claimed, 0)

    def seated(self, principal: str) -> int:
        """How many of a principal are inside."""
        return self._seated.get(principal, 0)

    def arrive(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Somebody comes; goes in at once, or waits, or is turned away, perhaps somebody else for him."""
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
        """Somebody is done, or waits no more. Whoever has arrived leaves once, whatever became of him."""
        if ticket.inside:
            ticket.inside = False
            self.inside -= 1
            self._seated[ticket.principal] -= 1
            self._promised -= ticket.owed
            self._claimed -= ticket.claimed
            self._freed.append(now)
        elif ticket.waiting:
            self._step_out(ticket)
        if ticket.principal not in self._lines and not self.seated(ticket.principal):  # nothing is kept of who is gone
            self._seated.pop(ticket.principal, None)
            self._turns.pop(ticket.principal, None)
        return self._admit(now)

    def hold(self, ticket: Ticket, pages: int) -> None:
        """Somebody inside holds so many pages by now."""
        if ticket.inside and pages > ticket.held:
            self._promised -= ticket.owed
            self._claimed -= ticket.claimed
            ticket.held = pages
            self._promised += ticket.owed
            self._claimed += ticket.claimed

    def tick(self, now: float) -> list[Ticket]:
        """Time has passed, or memory has come free."""
        settled = self._admit(now)
        for ticket in [ticket for ticket in self._waiters() if ticket.deadline <= now]:
            self._step_out(ticket)
            settled.append(self._refuse(ticket, Reason.KV_TIMEOUT if ticket.starved else Reason.TIMEOUT))
        return settled + self._admit(now)

    def next_tick(self, now: float) -> float | None:
        """When time matters next, if it does."""
        if not self.waiting:
            return None
        deadline = min(ticket.deadline for ticket in self._waiters())
        return min(deadline, now + _LOOK_SECONDS) if any(t.starved for t in self._waiters()) else deadline

    def retry_after(self, now: float) -> int:
        """Whole seconds until one more would probably go in, by how fast seats came free lately."""
        while self._freed and self._freed[0] < now - _RATE_SECONDS:
            self._freed.popleft()
        each = (now - self._freed[0]) / len(self._freed) if self._freed else _FIRST_RATE
        return min(max(math.ceil((self.waiting + 1) * each), 1), _LONGEST_RETRY)

    def close(self) -> list[Ticket]:
        """Everybody who waits goes away; the caller says why."""
        waiters = list(self._waiters())
        for ticket in waiters:
            self._step_out(ticket)
        return waiters

    def _admit(self, now: float) -> list[Ticket]:
        """Let in whoever may go, each principal's first in the order of turns."""
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
            # It moves on whoever goes in: however many newcomers there are, nobody's turn is put off for ever.
            self._turn = max(self._turn, turn) + ticket.pages / len(self._turns)
            admitted.append(ticket)
        return admitted

    def _next(self, now: float) -> Ticket | None:
        """Whose turn it is, of those who have the memory."""
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
        """The queue is too long: the newest anonymous waiter goes, else the newest one of whoever has most there."""
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
        """Take a ticket out of its line."""
        line = self._lines[ticket.principal]
        line.remove(ticket)
        if not line:
            del self._lines[ticket.principal]
        ticket.waiting = False
        self.waiting -= 1

    def _waiters(self) -> Iterator[Ticket]:
        for line in self._lines.values():
            yield from line
