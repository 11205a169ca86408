"""Properties of the fair queue: no request starves, limits hold, and no state remains after the last request."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helexa.neuron.admission.fair_queue import ANONYMOUS, Gate, Limits, Reason, Ticket

PRINCIPALS = (ANONYMOUS, "a", "b", "c")


class FairQueueMachine(RuleBasedStateMachine):
    """Random arrivals, departures, memory growth and clock steps, with one shared pool of pages."""

    @initialize(
        seats=st.integers(1, 10),
        queue=st.integers(0, 8),
        per_principal=st.sampled_from((0, 0, 2, 5)),
        anon_seats=st.integers(0, 10),
        pages=st.integers(4, 40),
    )
    def create(self, seats: int, queue: int, per_principal: int, anon_seats: int, pages: int) -> None:
        self.limits = Limits(
            seats=seats,
            queue=queue,
            wait=30,
            kv_wait=240,
            per_principal=per_principal,
            anon_seats=min(anon_seats, seats),
            anon_pending=seats + queue,
            pages=pages,
        )
        self.gate = Gate(self.limits)
        self.now = 0.0
        self.tickets: list[Ticket] = []
        self.arrivals: dict[Ticket, float] = {}
        self.held: dict[Ticket, int] = {}  # pages that the engine holds for each request

    def settle(self, settled: list[Ticket]) -> None:
        for ticket in settled:
            assert ticket.inside != (ticket.refused is not None)
            assert not ticket.waiting

    def look(self) -> None:
        self.gate.free = self.limits.pages - sum(self.held.values())

    @rule(principal=st.sampled_from(PRINCIPALS), least=st.integers(1, 44), extra=st.integers(0, 8))
    def arrive(self, principal: str, least: int, extra: int) -> None:
        ticket = Ticket(principal=principal, pages=least + extra, least=least)
        self.tickets.append(ticket)
        self.arrivals[ticket] = self.now
        self.look()
        self.settle(self.gate.arrive(ticket, self.now))
        assert ticket.inside or ticket.waiting or ticket.refused

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        self.tickets.remove(ticket)
        self.held.pop(ticket, None)
        self.look()
        self.settle(self.gate.leave(ticket, self.now))

    @precondition(lambda self: any(ticket.inside for ticket in self.tickets))
    @rule(data=st.data(), reported=st.booleans())
    def grow(self, data: st.DataObject, reported: bool) -> None:
        ticket = data.draw(st.sampled_from([ticket for ticket in self.tickets if ticket.inside]))
        self.held[ticket] = data.draw(st.integers(self.held.get(ticket, 0), ticket.pages))
        self.look()
        if reported:
            self.gate.hold(ticket, self.held[ticket])

    @rule(seconds=st.sampled_from((0.1, 5.0, 31.0, 241.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.look()
        self.settle(self.gate.tick(self.now))

    @invariant()
    def check_limits(self) -> None:
        if not hasattr(self, "gate"):
            return
        gate, limits = self.gate, self.limits
        inside = [ticket for ticket in self.tickets if ticket.inside]
        waiting = [ticket for ticket in self.tickets if ticket.waiting]
        assert (gate.inside, gate.waiting) == (len(inside), len(waiting))
        assert gate.inside <= limits.seats
        assert gate.waiting <= limits.queue
        assert gate.seated(ANONYMOUS) <= limits.anon_seats
        for principal in PRINCIPALS:
            mine = sum(ticket.principal == principal for ticket in inside)
            assert gate.seated(principal) == mine <= (limits.share if principal else limits.anon_seats)
        assert sum(ticket.pages for ticket in inside) <= limits.pages or len(inside) == 1, (
            "more pages reserved than exist"
        )
        unclaimed = limits.pages - sum(ticket.pages for ticket in inside)
        assert gate.available == max(unclaimed, 0), "available pages differ from unreserved pages"
        for ticket in waiting:
            assert self.now - self.arrivals[ticket] <= limits.wait + limits.kv_wait
        if waiting and not inside:
            raise AssertionError("requests wait although none runs")

    def teardown(self) -> None:
        if not hasattr(self, "gate"):
            return
        for ticket in list(self.tickets):
            self.settle(self.gate.leave(ticket, self.now))
        gate = self.gate
        gate.free = self.limits.pages
        assert (gate.inside, gate.waiting, gate.available) == (0, 0, self.limits.pages)
        assert not gate._lines and not gate._turns and not gate._seated


TestFairQueue = FairQueueMachine.TestCase
TestFairQueue.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    seats=st.integers(1, 9),
    requests=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60)), min_size=1, max_size=120),
    seed=st.randoms(use_true_random=False),
)
def test_every_waiting_request_is_admitted(seats: int, requests: list[tuple[str, int]], seed: object) -> None:
    """Without cancellations and timeouts, every request is admitted and none is rejected."""
    limits = Limits(
        seats=seats, queue=200, wait=1e9, kv_wait=1e9, per_principal=0, anon_seats=1, anon_pending=0, pages=60
    )
    gate = Gate(limits)
    served: list[Ticket] = []
    inside: list[Ticket] = []
    tickets = [Ticket(principal=principal, pages=pages, least=pages) for principal, pages in requests]
    for ticket in tickets:
        inside += gate.arrive(ticket, 0.0)
    while inside:
        ticket = inside.pop(seed.randrange(len(inside)))  # type: ignore[attr-defined]
        served.append(ticket)
        inside += gate.leave(ticket, 0.0)
    assert set(served) == set(tickets)
    assert gate.refusals == dict.fromkeys(Reason, 0)


@settings(max_examples=40, deadline=None)
@given(flood=st.integers(1, 100), newcomers=st.booleans())
def test_a_light_principal_waits_for_at_most_twelve_requests(flood: int, newcomers: bool) -> None:
    """A new principal is admitted within twelve departures, however many requests of others wait or arrive."""
    limits = Limits(seats=4, queue=300, wait=1e9, kv_wait=1e9, per_principal=0, anon_seats=1, anon_pending=0, pages=60)
    gate = Gate(limits)
    inside = [Ticket(principal="heavy", pages=5, least=5) for _ in range(flood)]
    for ticket in inside:
        gate.arrive(ticket, 0.0)
    light = Ticket(principal="light", pages=5, least=5)
    gate.arrive(light, 0.0)
    inside = [ticket for ticket in inside if ticket.inside]
    for count in range(12):
        if light.inside:
            break
        if newcomers:
            gate.arrive(Ticket(principal=f"new{count}", pages=5, least=5), 0.0)
        inside += [ticket for ticket in gate.leave(inside.pop(0), 0.0) if ticket.inside]
    assert light.inside
