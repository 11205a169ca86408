"""The fair queue without tasks: order of admission, rejections, and memory accounting."""

from dataclasses import replace

import pytest

from helexa.neuron.admission.fair_queue import ANONYMOUS, Gate, Limits, Reason, Ticket

LIMITS = Limits(seats=2, queue=4, wait=30, kv_wait=240, per_principal=0, anon_seats=2, anon_pending=100, pages=100)


class Simulation:
    """A fair queue with a manual clock and a record of the order of admission."""

    def __init__(self, **limits: int) -> None:
        self.gate = Gate(replace(LIMITS, **limits))
        self.now = 0.0
        self.order: list[str] = []

    def arrive(self, name: str, pages: int = 1, least: int = 0) -> Ticket:
        ticket = Ticket(principal=name.rstrip("0123456789"), pages=pages, least=least or pages)
        ticket.name = name  # type: ignore[attr-defined]
        self._note(self.gate.arrive(ticket, self.now))
        return ticket

    def leave(self, *tickets: Ticket) -> list[str]:
        """Let the requests end; return the names of the requests admitted in their place."""
        before = len(self.order)
        for ticket in tickets:
            self._note(self.gate.leave(ticket, self.now))
        return self.order[before:]

    def tick(self, seconds: float) -> list[Ticket]:
        self.now += seconds
        settled = self.gate.tick(self.now)
        self._note(settled)
        return settled

    def _note(self, settled: list[Ticket]) -> None:
        self.order += [ticket.name for ticket in settled if ticket.inside]  # type: ignore[attr-defined]


def test_requests_are_admitted_until_all_slots_are_taken() -> None:
    queue = Simulation()
    one, two, three = queue.arrive("a1"), queue.arrive("b1"), queue.arrive("c1")
    assert (one.inside, two.inside, three.inside, three.waiting) == (True, True, False, True)
    assert queue.leave(one) == ["c1"]
    assert (queue.gate.inside, queue.gate.waiting) == (2, 0)


def test_principals_take_turns_regardless_of_queue_length() -> None:
    queue = Simulation(seats=1, queue=20)
    inside = queue.arrive("a0")
    waiters = {ticket.name: ticket for ticket in [queue.arrive(f"a{n}") for n in range(1, 6)]}  # type: ignore[attr-defined]
    waiters |= {name: queue.arrive(name) for name in ("b1", "b2", "c1")}
    order: list[str] = []
    for _ in range(len(waiters)):
        (name,) = queue.leave(inside)
        inside = waiters[name]
        order.append(name)
    assert [name for name in order if name.startswith("a")] == ["a1", "a2", "a3", "a4", "a5"]
    assert set(order[:3]) >= {"b1", "c1"}, "new principals go before principals that had a turn"
    assert order.index("b2") <= 4


def test_a_turn_costs_the_memory_of_its_request() -> None:
    queue = Simulation(seats=1, queue=40)
    inside = queue.arrive("x0")
    waiters = {f"a{n}": queue.arrive(f"a{n}", pages=30) for n in range(1, 5)}
    waiters |= {f"b{n}": queue.arrive(f"b{n}", pages=10) for n in range(1, 13)}
    order: list[str] = []
    for _ in range(8):
        (name,) = queue.leave(inside)
        inside = waiters[name]
        order.append(name[0])
    assert order.count("b") == 6
    assert order.count("a") == 2


def test_one_principal_holds_all_slots_but_one_of_eight() -> None:
    queue = Simulation(seats=8, queue=20)
    heavy = [queue.arrive(f"a{n}") for n in range(20)]
    assert sum(ticket.inside for ticket in heavy) == 7
    assert queue.arrive("b1").inside
    assert queue.arrive("c1").waiting
    assert queue.leave(heavy[0], heavy[1]) == ["a7", "c1"]


def test_anonymous_requests_wait_for_requests_with_a_principal() -> None:
    queue = Simulation(seats=1)
    inside, anonymous, known = queue.arrive("a1"), queue.arrive("1"), queue.arrive("b1")
    assert anonymous.principal == ANONYMOUS
    assert queue.leave(inside) == ["b1"]
    assert queue.leave(known) == ["1"]
    assert queue.gate.seated(ANONYMOUS) == 1


def test_anonymous_requests_have_separate_limits() -> None:
    queue = Simulation(anon_seats=1, anon_pending=2)
    one, two, three = queue.arrive("1"), queue.arrive("2"), queue.arrive("3")
    assert (one.inside, two.waiting, three.refused) == (True, True, Reason.ANON_YIELD)
    assert queue.arrive("a1").inside
    assert Simulation(anon_seats=0).arrive("1").refused is Reason.ANON_YIELD


def test_identified_request_replaces_a_waiting_anonymous_request() -> None:
    queue = Simulation(seats=1, queue=2)
    queue.arrive("a1")
    old, new, known = queue.arrive("1"), queue.arrive("2"), queue.arrive("a2")
    assert (old.waiting, new.refused, known.waiting) == (True, Reason.ANON_YIELD, True)
    assert queue.arrive("3").refused is Reason.QUEUE_FULL


def test_full_queue_rejects_the_principal_with_most_requests() -> None:
    queue = Simulation(seats=1, queue=3)
    queue.arrive("a0")
    waiters = [queue.arrive(f"a{n}") for n in range(1, 4)]
    other = queue.arrive("b1")
    assert (other.waiting, waiters[2].refused) == (True, Reason.QUEUE_FULL)
    assert queue.arrive("a9").refused is Reason.QUEUE_FULL
    assert queue.arrive("b2").refused is Reason.QUEUE_FULL, (
        "with two of three places, b would wait with more requests than a"
    )
    assert queue.gate.refusals[Reason.QUEUE_FULL] == 3


def test_per_principal_limit_does_not_affect_other_principals() -> None:
    queue = Simulation(per_principal=2, seats=1, queue=9)
    queue.arrive("a1"), queue.arrive("a2")
    assert queue.arrive("a3").refused is Reason.PER_PRINCIPAL
    assert queue.arrive("b1").waiting
    assert [queue.arrive(str(n)).refused for n in range(3)] == [None] * 3


def test_waiting_request_times_out() -> None:
    queue = Simulation(seats=1)
    queue.arrive("a1")
    waiter = queue.arrive("a2")
    assert queue.gate.next_tick(queue.now) == 30
    assert queue.tick(29.9) == []
    assert queue.tick(0.2) == [waiter]
    assert waiter.refused is Reason.TIMEOUT
    queue.leave(waiter)
    assert (queue.gate.waiting, queue.gate.next_tick(queue.now)) == (0, None)


def test_sixteen_smaller_requests_pass_one_that_waits_for_memory() -> None:
    queue = Simulation(seats=4, queue=40)
    first = queue.arrive("a1", pages=60)
    large = queue.arrive("b1", pages=70)
    assert (large.waiting, large.starved) == (True, True)
    passed = 0
    while (small := queue.arrive("c1", pages=10)).inside:
        passed += 1
        queue.leave(small)
    assert passed == 16
    queue.tick(100)
    assert small.refused is Reason.TIMEOUT
    assert large.waiting
    assert queue.leave(first) == ["b1"]


def test_reservation_ends_when_the_engine_holds_the_pages() -> None:
    queue = Simulation(seats=4)
    one = queue.arrive("a1", pages=60)
    assert queue.gate.available == 40
    queue.gate.free = 55
    queue.gate.hold(one, 45)
    assert queue.gate.available == 40
    queue.gate.free = 30
    queue.gate.hold(one, 70)  # more pages than reserved
    assert queue.gate.available == 30
    assert queue.arrive("b1", pages=30).inside
    assert queue.gate.available == 0
    queue.leave(one)
    queue.gate.free = 100
    assert queue.gate.available == 70


def test_pages_of_an_unreported_prompt_count_once() -> None:
    queue = Simulation(seats=4)
    queue.arrive("a1", pages=60)
    queue.gate.free = 45  # the engine holds 55 pages for the request, and has not reported a token
    assert queue.gate.available == 40
    assert queue.arrive("b1", pages=40).inside
    assert queue.gate.available == 0


def test_pages_shared_by_two_requests_count_once() -> None:
    queue = Simulation(seats=4)
    for name in ("a1", "a2"):
        queue.gate.hold(queue.arrive(name, pages=50), 50)
    queue.gate.free = 45
    assert queue.gate.available == 45


def test_tick_notices_pages_freed_without_notice() -> None:
    queue = Simulation(seats=4)
    queue.gate.hold(queue.arrive("a1", pages=60), 60)
    queue.gate.free = 40
    waiter = queue.arrive("b1", pages=50)
    assert waiter.waiting
    assert (queue.gate.next_tick(queue.now) or 99) < queue.now + 1
    queue.gate.free = 60
    assert queue.tick(0.25) == [waiter]
    assert waiter.inside


def test_idle_model_admits_without_waiting_for_memory() -> None:
    queue = Simulation()
    queue.gate.free = 0
    assert queue.arrive("a1", pages=100, least=90).inside


def test_request_larger_than_the_cache_is_rejected_at_once() -> None:
    assert Simulation().arrive("a1", pages=120, least=101).refused is Reason.KV_UNSERVABLE
    assert Simulation().arrive("a1", pages=120, least=100).inside


def test_retry_after_follows_the_rate_of_freed_slots() -> None:
    queue = Simulation(seats=1, queue=10)
    assert queue.gate.retry_after(queue.now) == 2
    for _ in range(20):
        ticket = queue.arrive("a1")
        queue.now += 0.5
        queue.leave(ticket)
    inside = queue.arrive("a1")
    for n in range(9):
        queue.arrive(f"b{n}")
    assert queue.gate.retry_after(queue.now) in (4, 5)
    queue.now += 61
    assert queue.gate.retry_after(queue.now) == 20, "the measured rate expires after 60 s"
    queue.leave(inside)
    queue.now += 59
    assert queue.gate.retry_after(queue.now) == 120


def test_close_removes_all_waiting_requests() -> None:
    queue = Simulation(seats=1)
    inside, waiter = queue.arrive("a1"), queue.arrive("a2")
    assert queue.gate.close() == [waiter]
    queue.leave(waiter)
    queue.leave(inside)
    assert (queue.gate.inside, queue.gate.waiting, queue.gate.available) == (0, 0, 100)


@pytest.mark.parametrize("seats", [1, 2, 7])
def test_one_principal_may_hold_all_of_fewer_than_eight_slots(seats: int) -> None:
    queue = Simulation(seats=seats, queue=20)
    assert sum(queue.arrive(f"a{n}").inside for n in range(9)) == seats
