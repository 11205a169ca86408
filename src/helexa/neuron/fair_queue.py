"""The admission queue of one model, as a state machine without a clock.

A request gets its slot and its KV cache memory at the same moment. A waiting request holds neither of them. Requests
therefore cannot deadlock over slots and memory.

The principals (API key owners) share the slots fairly:

* The next request comes from the principal whose admitted requests, finished ones included, had the fewest KV pages.
* If the model has at least `_MANY_SLOTS` slots, one principal may hold all of them except one.
* Anonymous requests count as one principal, and are admitted only if no request with a principal waits.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

ANONYMOUS = ""

_MANY_SLOTS = 8
_MAX_PASSES = 16  # how many smaller requests may be admitted ahead of a request that waits for memory
_CHECK_SECONDS = 0.25  # interval of checks for KV cache memory that the engine freed without a call of `leave`
_RATE_SECONDS = 60.0
_RATE_SLOTS = 64
_FIRST_RATE = 2.0  # assumed seconds per freed slot, until a slot is freed
_LONGEST_RETRY = 120


class Reason(StrEnum):
    """Reasons for rejecting a request."""

    QUEUE_FULL = "queue_full"
    TIMEOUT = "timeout"  # no slot became free in time
    PER_PRINCIPAL = "per_principal"  # the principal has too many requests
    ANON_YIELD = "anon_yield"  # an anonymous request gives way to requests with a principal, or there are too many
    KV_TIMEOUT = "kv_timeout"  # not enough KV pages became free in time
    KV_UNSERVABLE = "kv_unservable"  # the prompt needs more KV pages than the model has


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Admission limits of one model."""

    slots: int  # maximum number of admitted requests
    queue: int  # maximum number of waiting requests
    wait: float  # maximum seconds that a request waits for a slot
    # Maximum seconds that a request waits for KV cache memory. The time starts when the request is next in line for a
    # free slot, but too few KV pages are available.
    kv_wait: float
    per_principal: int  # maximum number of admitted and waiting requests of one principal; 0 for no limit
    anon_slots: int  # maximum number of admitted anonymous requests; 0 rejects all anonymous requests
    anon_pending: int  # maximum number of admitted and waiting anonymous requests
    pages: int  # total number of KV pages of the model

    @property
    def share(self) -> int:
        """Maximum number of slots that one principal may hold at once."""
        return share_of(self.slots)


def share_of(slots: int) -> int:
    """Return how many of a model's `slots` slots one principal may hold."""
    # One slot is kept for other principals, but only if the model has many slots, so that one fewer costs little.
    return slots - 1 if slots >= _MANY_SLOTS else slots


@dataclass(eq=False, kw_only=True)
class Ticket:
    """One request in the admission queue."""

    principal: str
    pages: int  # number of KV pages to reserve for the request
    min_pages: int  # number of KV pages that the prompt and one output token need
    waiting: bool = False
    admitted: bool = False
    rejected: Reason | None = None
    number: int = 0  # position in the order of arrival
    deadline: float = math.inf  # time at which a waiting request is rejected
    starved: bool = False  # whether the request was next in line for a slot but had to wait for KV cache memory
    passed: int = 0  # number of later requests that were admitted before this request while it waited for memory
    held: int = 0  # number of KV pages that the engine has allocated for the request, as last reported by the engine

    @property
    def owed(self) -> int:
        """Number of KV pages reserved for the request but not yet allocated."""
        return max(self.pages - self.held, 0)

    @property
    def claimed(self) -> int:
        """Number of reserved or of allocated KV pages, whichever is larger."""
        return max(self.pages, self.held)


class FairQueue:
    """Decides which requests of one model are admitted, queued or rejected.

    Each request has a `Ticket`. The methods `arrive`, `leave` and `tick` return the tickets of the requests that they
    have admitted or rejected.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        # Number of free KV pages, as last reported by the engine. The caller updates this number.
        self.free = limits.pages
        self.waiting = 0
        self.admitted = 0
        self.rejections = dict.fromkeys(Reason, 0)  # number of rejected requests since the start, by reason
        self._queues: dict[str, deque[Ticket]] = {}  # waiting tickets by principal
        self._admitted_by_principal: dict[str, int] = {}
        self._page_sums: dict[str, float] = {}  # sum of the pages of admitted requests, by principal with requests
        self._initial_sum = 0.0  # sum of pages with which a new principal starts
        self._promised = 0  # sum of `owed` of all admitted tickets
        self._claimed = 0  # sum of `claimed` of all admitted tickets
        self._arrived = 0
        self._freed: deque[float] = deque(maxlen=_RATE_SLOTS)

    @property
    def available(self) -> int:
        """Number of KV pages that can be reserved for the next request."""
        # Both terms may be too low, so the larger one is used. The first term counts the pages of a prompt twice until
        # the engine reports them with the first token: `free` excludes them, and `_promised` still includes them. In
        # the second term, `_claimed` counts a page that several requests share once for each of these requests.
        return max(self.free - self._promised, self.limits.pages - self._claimed, 0)

    def admitted_of(self, principal: str) -> int:
        """Return the number of requests of `principal` that are admitted now."""
        return self._admitted_by_principal.get(principal, 0)

    def arrive(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Admit, queue or reject a new request; return all tickets admitted or rejected.

        If the queue is full, a waiting request may be rejected instead of the new request.
        """
        limits, principal = self.limits, ticket.principal
        pending = self.admitted_of(principal) + len(self._queues.get(principal, ()))
        if ticket.min_pages > limits.pages:
            return [self._reject(ticket, Reason.KV_UNSERVABLE)]
        if limits.per_principal and principal != ANONYMOUS and pending >= limits.per_principal:
            return [self._reject(ticket, Reason.PER_PRINCIPAL)]
        if principal == ANONYMOUS and (not limits.anon_slots or pending >= limits.anon_pending):
            return [self._reject(ticket, Reason.ANON_YIELD)]
        self._arrived += 1
        ticket.number, ticket.deadline = self._arrived, now + limits.wait
        ticket.pages = min(ticket.pages, limits.pages)
        if principal not in self._queues:
            # A new principal starts with a sum close to the other principals' sums. With a sum of zero, all requests of
            # the new principal would be admitted before those of the others.
            self._page_sums[principal] = max(self._page_sums.get(principal, 0.0), self._initial_sum)
        self._queues.setdefault(principal, deque()).append(ticket)
        ticket.waiting = True
        self.waiting += 1
        # The queue is checked after the admission, because a request that is admitted at once needs no place in it.
        settled = self._admit(now)
        if self.waiting > limits.queue:
            settled.append(self._evict(ticket))
        return settled

    def leave(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Remove an ended request, and return the tickets admitted in its place.

        The caller must call this method once for each request that it passed to `arrive`.
        """
        if ticket.admitted:
            ticket.admitted = False
            self.admitted -= 1
            self._admitted_by_principal[ticket.principal] -= 1
            self._promised -= ticket.owed
            self._claimed -= ticket.claimed
            self._freed.append(now)
        elif ticket.waiting:
            self._dequeue(ticket)
        # A principal without requests is removed, so that the dictionaries do not grow with each new name.
        if ticket.principal not in self._queues and not self.admitted_of(ticket.principal):
            self._admitted_by_principal.pop(ticket.principal, None)
            self._page_sums.pop(ticket.principal, None)
        return self._admit(now)

    def hold(self, ticket: Ticket, pages: int) -> None:
        """Record that the engine has allocated `pages` KV pages in total for a request.

        The call has no effect if the request is not admitted, or if a larger number is recorded already.
        """
        if ticket.admitted and pages > ticket.held:
            self._promised -= ticket.owed
            self._claimed -= ticket.claimed
            ticket.held = pages
            self._promised += ticket.owed
            self._claimed += ticket.claimed

    def tick(self, now: float) -> list[Ticket]:
        """Admit requests that fit now, reject overdue requests, and return their tickets.

        The caller must call this method at the time that `next_tick` returns.
        """
        settled = self._admit(now)
        for ticket in [ticket for ticket in self._waiters() if ticket.deadline <= now]:
            self._dequeue(ticket)
            settled.append(self._reject(ticket, Reason.KV_TIMEOUT if ticket.starved else Reason.TIMEOUT))
        return settled + self._admit(now)

    def next_tick(self, now: float) -> float | None:
        """Return when the caller must next call `tick`; None if nothing waits."""
        if not self.waiting:
            return None
        deadline = min(ticket.deadline for ticket in self._waiters())
        return min(deadline, now + _CHECK_SECONDS) if any(t.starved for t in self._waiters()) else deadline

    def retry_after(self, now: float) -> int:
        """Estimate the seconds (1 to `_LONGEST_RETRY`) until a request may be admitted."""
        while self._freed and self._freed[0] < now - _RATE_SECONDS:
            self._freed.popleft()
        # Seconds per freed slot, measured over the last minute.
        each = (now - self._freed[0]) / len(self._freed) if self._freed else _FIRST_RATE
        return min(max(math.ceil((self.waiting + 1) * each), 1), _LONGEST_RETRY)

    def close(self) -> list[Ticket]:
        """Remove all waiting requests and return their tickets.

        These tickets are neither admitted nor rejected.
        """
        waiters = list(self._waiters())
        for ticket in waiters:
            self._dequeue(ticket)
        return waiters

    def _admit(self, now: float) -> list[Ticket]:
        """Admit requests until no slot is free; return the admitted tickets."""
        admitted: list[Ticket] = []
        while self.admitted < self.limits.slots and (ticket := self._next(now)) is not None:
            self._dequeue(ticket)
            ticket.admitted = True
            self.admitted += 1
            self._admitted_by_principal[ticket.principal] = self.admitted_of(ticket.principal) + 1
            self._promised += ticket.owed
            self._claimed += ticket.claimed
            page_sum = self._page_sums[ticket.principal]
            self._page_sums[ticket.principal] = page_sum + ticket.pages
            # The sum with which new principals start grows with each admission. Otherwise, a series of new principals
            # could delay a waiting principal forever.
            self._initial_sum = max(self._initial_sum, page_sum) + ticket.pages / len(self._page_sums)
            admitted.append(ticket)
        return admitted

    def _next(self, now: float) -> Ticket | None:
        """Return the next request to admit, or None; mark requests that lack memory."""
        known = [queue[0] for principal, queue in self._queues.items() if queue and principal != ANONYMOUS]
        anonymous = self._queues.get(ANONYMOUS)
        # Anonymous requests are admitted only if no request with a principal waits.
        heads = known or ([anonymous[0]] if anonymous else [])
        passed_over: list[Ticket] = []
        for ticket in sorted(heads, key=lambda ticket: (self._page_sums[ticket.principal], ticket.number)):
            if self.admitted_of(ticket.principal) >= self._ceiling(ticket.principal):
                continue
            # If no request is admitted, waiting would free no pages. Therefore, this request is admitted in any case,
            # and the engine may preempt it later.
            if not self.admitted or ticket.pages <= self.available:
                for earlier in passed_over:
                    earlier.passed += 1
                return ticket
            if not ticket.starved:
                ticket.starved, ticket.deadline = True, now + self.limits.kv_wait
            # Smaller requests of other principals may use the free pages, but only `_MAX_PASSES` times, so that this
            # request is not starved.
            if ticket.passed >= _MAX_PASSES:
                return None
            passed_over.append(ticket)
        return None

    def _ceiling(self, principal: str) -> int:
        return self.limits.anon_slots if principal == ANONYMOUS else self.limits.share

    def _evict(self, newcomer: Ticket) -> Ticket:
        """Reject one waiting request because the queue is too long. Return its ticket."""
        anonymous = self._queues.get(ANONYMOUS)
        if anonymous and newcomer.principal != ANONYMOUS:  # the newest anonymous request yields to a known principal
            victim, reason = anonymous[-1], Reason.ANON_YIELD
        elif newcomer.principal == ANONYMOUS:
            victim, reason = newcomer, Reason.QUEUE_FULL
        else:  # the principal with the most waiting requests loses one
            longest = max(self._queues, key=lambda name: (len(self._queues[name]), name == newcomer.principal))
            victim, reason = self._queues[longest][-1], Reason.QUEUE_FULL
        self._dequeue(victim)
        return self._reject(victim, reason)

    def _reject(self, ticket: Ticket, reason: Reason) -> Ticket:
        ticket.rejected = reason
        self.rejections[reason] += 1
        return ticket

    def _dequeue(self, ticket: Ticket) -> None:
        """Remove a waiting ticket from the queue of its principal."""
        queue = self._queues[ticket.principal]
        queue.remove(ticket)
        if not queue:
            del self._queues[ticket.principal]
        ticket.waiting = False
        self.waiting -= 1

    def _waiters(self) -> Iterator[Ticket]:
        for queue in self._queues.values():
            yield from queue
