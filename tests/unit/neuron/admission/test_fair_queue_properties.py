"""Properties of the fair queue: no request starves, limits hold, and no state remains after the last request."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helexa.neuron.fair_queue import ANONYMOUS, FairQueue, Limits, Reason, Ticket

PRINCIPALS = (ANONYMOUS, "a", "b", "c")


class FairQueueMachine(RuleBasedStateMachine):
    """Random arrivals, departures, memory growth and clock steps, with one shared pool of pages."""

    @initialize(
        slots=st.integers(1, 10),
        queue=st.integers(0, 8),
        per_principal=st.sampled_from((0, 0, 2, 5)),
        anon_slots=st.integers(0, 10),
        pages=st.integers(4, 40),
    )
    def create(self, slots: int, queue: int, per_principal: int, anon_slots: int, pages: int) -> None:
        self.limits = Limits(
            slots=slots,
            queue=queue,
            wait=30,
            kv_wait=240,
            per_principal=per_principal,
            anon_slots=min(anon_slots, slots),
            anon_pending=slots + queue,
            pages=pages,
        )
        self.queue = FairQueue(self.limits)
        self.now = 0.0
        self.tickets: list[Ticket] = []
        self.arrivals: dict[Ticket, float] = {}
        self.held: dict[Ticket, int] = {}  # pages that the engine holds for each request

    def settle(self, settled: list[Ticket]) -> None:
        for ticket in settled:
            assert ticket.admitted != (ticket.rejected is not None)
            assert not ticket.waiting

    def look(self) -> None:
        self.queue.free = self.limits.pages - sum(self.held.values())

    @rule(principal=st.sampled_from(PRINCIPALS), min_pages=st.integers(1, 44), extra=st.integers(0, 8))
    def arrive(self, principal: str, min_pages: int, extra: int) -> None:
        ticket = Ticket(principal=principal, pages=min_pages + extra, min_pages=min_pages)
        self.tickets.append(ticket)
        self.arrivals[ticket] = self.now
        self.look()
        self.settle(self.queue.arrive(ticket, self.now))
        assert ticket.admitted or ticket.waiting or ticket.rejected

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        self.tickets.remove(ticket)
        self.held.pop(ticket, None)
        self.look()
        self.settle(self.queue.leave(ticket, self.now))

    @precondition(lambda self: any(ticket.admitted for ticket in self.tickets))
    @rule(data=st.data(), reported=st.booleans())
    def grow(self, data: st.DataObject, reported: bool) -> None:
        ticket = data.draw(st.sampled_from([ticket for ticket in self.tickets if ticket.admitted]))
        self.held[ticket] = data.draw(st.integers(self.held.get(ticket, 0), ticket.pages))
        self.look()
        if reported:
            self.queue.hold(ticket, self.held[ticket])

    @rule(seconds=st.sampled_from((0.1, 5.0, 31.0, 241.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.look()
        self.settle(self.queue.tick(self.now))

    @invariant()
    def check_limits(self) -> None:
        if not hasattr(self, "queue"):
            return
        queue, limits = self.queue, self.limits
        inside = [ticket for ticket in self.tickets if ticket.admitted]
        waiting = [ticket for ticket in self.tickets if ticket.waiting]
        assert (queue.admitted, queue.waiting) == (len(inside), len(waiting))
        assert queue.admitted <= limits.slots
        assert queue.waiting <= limits.queue
        assert queue.admitted_of(ANONYMOUS) <= limits.anon_slots
        for principal in PRINCIPALS:
            mine = sum(ticket.principal == principal for ticket in inside)
            assert queue.admitted_of(principal) == mine <= (limits.share if principal else limits.anon_slots)
        assert sum(ticket.pages for ticket in inside) <= limits.pages or len(inside) == 1, (
            "more pages reserved than exist"
        )
        unclaimed = limits.pages - sum(ticket.pages for ticket in inside)
        assert queue.available == max(unclaimed, 0), "available pages differ from unreserved pages"
        for ticket in waiting:
            assert self.now - self.arrivals[ticket] <= limits.wait + limits.kv_wait
        if waiting and not inside:
            raise AssertionError("requests wait although none runs")

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        for ticket in list(self.tickets):
            self.settle(self.queue.leave(ticket, self.now))
        queue = self.queue
        queue.free = self.limits.pages
        assert (queue.admitted, queue.waiting, queue.available) == (0, 0, self.limits.pages)
        assert not queue._queues and not queue._page_sums and not queue._admitted_by_principal


TestFairQueue = FairQueueMachine.TestCase
TestFairQueue.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 9),
    requests=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60)), min_size=1, max_size=120),
    seed=st.randoms(use_true_random=False),
)
def test_every_waiting_request_is_admitted_eventually(
    slots: int, requests: list[tuple[str, int]], seed: object
) -> None:
    """Without cancellations and timeouts, every request is admitted and none is rejected."""
    limits = Limits(
        slots=slots, queue=200, wait=1e9, kv_wait=1e9, per_principal=0, anon_slots=1, anon_pending=0, pages=60
    )
    queue = FairQueue(limits)
    served: list[Ticket] = []
    inside: list[Ticket] = []
    tickets = [Ticket(principal=principal, pages=pages, min_pages=pages) for principal, pages in requests]
    for ticket in tickets:
        inside += queue.arrive(ticket, 0.0)
    while inside:
        ticket = inside.pop(seed.randrange(len(inside)))  # type: ignore[attr-defined]
        served.append(ticket)
        inside += queue.leave(ticket, 0.0)
    assert set(served) == set(tickets)
    assert queue.rejections == dict.fromkeys(Reason, 0)


@settings(max_examples=40, deadline=None)
@given(flood=st.integers(1, 100), newcomers=st.booleans())
def test_request_of_a_new_principal_is_admitted_after_at_most_twelve_others_end(flood: int, newcomers: bool) -> None:
    """A new principal is admitted within twelve departures, however many requests of others wait or arrive."""
    limits = Limits(slots=4, queue=300, wait=1e9, kv_wait=1e9, per_principal=0, anon_slots=1, anon_pending=0, pages=60)
    queue = FairQueue(limits)
    inside = [Ticket(principal="heavy", pages=5, min_pages=5) for _ in range(flood)]
    for ticket in inside:
        queue.arrive(ticket, 0.0)
    light = Ticket(principal="light", pages=5, min_pages=5)
    queue.arrive(light, 0.0)
    inside = [ticket for ticket in inside if ticket.admitted]
    for count in range(12):
        if light.admitted:
            break
        if newcomers:
            queue.arrive(Ticket(principal=f"new{count}", pages=5, min_pages=5), 0.0)
        inside += [ticket for ticket in queue.leave(inside.pop(0), 0.0) if ticket.admitted]
    assert light.admitted
