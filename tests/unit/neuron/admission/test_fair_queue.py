"""The fair queue without tasks: order of admission, rejections, and memory accounting."""

from dataclasses import replace

import pytest

from helexa.neuron.fair_queue import ANONYMOUS, FairQueue, Limits, Reason, Ticket

LIMITS = Limits(slots=2, queue=4, wait=30, kv_wait=240, per_principal=0, anon_slots=2, anon_pending=100, pages=100)


class Simulation:
    """A fair queue with a manual clock and a record of the order of admission."""

    def __init__(self, **limits: int) -> None:
        self.queue = FairQueue(replace(LIMITS, **limits))
        self.now = 0.0
        self.order: list[str] = []

    def arrive(self, name: str, pages: int = 1, min_pages: int = 0) -> Ticket:
        ticket = Ticket(principal=name.rstrip("0123456789"), pages=pages, min_pages=min_pages or pages)
        ticket.name = name  # type: ignore[attr-defined]
        self._note(self.queue.arrive(ticket, self.now))
        return ticket

    def leave(self, *tickets: Ticket) -> list[str]:
        """Let the requests end; return the names of the requests admitted in their place."""
        before = len(self.order)
        for ticket in tickets:
            self._note(self.queue.leave(ticket, self.now))
        return self.order[before:]

    def tick(self, seconds: float) -> list[Ticket]:
        self.now += seconds
        settled = self.queue.tick(self.now)
        self._note(settled)
        return settled

    def _note(self, settled: list[Ticket]) -> None:
        self.order += [ticket.name for ticket in settled if ticket.admitted]  # type: ignore[attr-defined]


def test_requests_are_admitted_until_no_slot_is_free() -> None:
    simulation = Simulation()
    one, two, three = simulation.arrive("a1"), simulation.arrive("b1"), simulation.arrive("c1")
    assert (one.admitted, two.admitted, three.admitted, three.waiting) == (True, True, False, True)
    assert simulation.leave(one) == ["c1"]
    assert (simulation.queue.admitted, simulation.queue.waiting) == (2, 0)


def test_principals_take_turns_regardless_of_queue_length() -> None:
    simulation = Simulation(slots=1, queue=20)
    inside = simulation.arrive("a0")
    waiters = {ticket.name: ticket for ticket in [simulation.arrive(f"a{n}") for n in range(1, 6)]}  # type: ignore[attr-defined]
    waiters |= {name: simulation.arrive(name) for name in ("b1", "b2", "c1")}
    order: list[str] = []
    for _ in range(len(waiters)):
        (name,) = simulation.leave(inside)
        inside = waiters[name]
        order.append(name)
    assert [name for name in order if name.startswith("a")] == ["a1", "a2", "a3", "a4", "a5"]
    assert set(order[:3]) >= {"b1", "c1"}, "new principals go before principals that had a turn"
    assert order.index("b2") <= 4


def test_principals_take_turns_by_the_memory_that_their_requests_need() -> None:
    simulation = Simulation(slots=1, queue=40)
    inside = simulation.arrive("x0")
    waiters = {f"a{n}": simulation.arrive(f"a{n}", pages=30) for n in range(1, 5)}
    waiters |= {f"b{n}": simulation.arrive(f"b{n}", pages=10) for n in range(1, 13)}
    order: list[str] = []
    for _ in range(8):
        (name,) = simulation.leave(inside)
        inside = waiters[name]
        order.append(name[0])
    assert order.count("b") == 6
    assert order.count("a") == 2


def test_one_principal_can_hold_at_most_seven_of_eight_slots() -> None:
    simulation = Simulation(slots=8, queue=20)
    heavy = [simulation.arrive(f"a{n}") for n in range(20)]
    assert sum(ticket.admitted for ticket in heavy) == 7
    assert simulation.arrive("b1").admitted
    assert simulation.arrive("c1").waiting
    assert simulation.leave(heavy[0], heavy[1]) == ["a7", "c1"]


def test_anonymous_requests_wait_for_requests_with_a_principal() -> None:
    simulation = Simulation(slots=1)
    inside, anonymous, known = simulation.arrive("a1"), simulation.arrive("1"), simulation.arrive("b1")
    assert anonymous.principal == ANONYMOUS
    assert simulation.leave(inside) == ["b1"]
    assert simulation.leave(known) == ["1"]
    assert simulation.queue.admitted_of(ANONYMOUS) == 1


def test_anonymous_requests_have_their_own_limits() -> None:
    simulation = Simulation(anon_slots=1, anon_pending=2)
    one, two, three = simulation.arrive("1"), simulation.arrive("2"), simulation.arrive("3")
    assert (one.admitted, two.waiting, three.rejected) == (True, True, Reason.ANON_YIELD)
    assert simulation.arrive("a1").admitted
    assert Simulation(anon_slots=0).arrive("1").rejected is Reason.ANON_YIELD


def test_identified_request_replaces_a_waiting_anonymous_request() -> None:
    simulation = Simulation(slots=1, queue=2)
    simulation.arrive("a1")
    old, new, known = simulation.arrive("1"), simulation.arrive("2"), simulation.arrive("a2")
    assert (old.waiting, new.rejected, known.waiting) == (True, Reason.ANON_YIELD, True)
    assert simulation.arrive("3").rejected is Reason.QUEUE_FULL


def test_full_queue_rejects_the_principal_with_most_requests() -> None:
    simulation = Simulation(slots=1, queue=3)
    simulation.arrive("a0")
    waiters = [simulation.arrive(f"a{n}") for n in range(1, 4)]
    other = simulation.arrive("b1")
    assert (other.waiting, waiters[2].rejected) == (True, Reason.QUEUE_FULL)
    assert simulation.arrive("a9").rejected is Reason.QUEUE_FULL
    assert simulation.arrive("b2").rejected is Reason.QUEUE_FULL, (
        "with two of three places, b would wait with more requests than a"
    )
    assert simulation.queue.rejections[Reason.QUEUE_FULL] == 3


def test_per_principal_limit_does_not_affect_other_principals() -> None:
    simulation = Simulation(per_principal=2, slots=1, queue=9)
    simulation.arrive("a1"), simulation.arrive("a2")
    assert simulation.arrive("a3").rejected is Reason.PER_PRINCIPAL
    assert simulation.arrive("b1").waiting
    assert [simulation.arrive(str(n)).rejected for n in range(3)] == [None] * 3


def test_request_that_waits_too_long_for_admission_times_out() -> None:
    simulation = Simulation(slots=1)
    simulation.arrive("a1")
    waiter = simulation.arrive("a2")
    assert simulation.queue.next_tick(simulation.now) == 30
    assert simulation.tick(29.9) == []
    assert simulation.tick(0.2) == [waiter]
    assert waiter.rejected is Reason.TIMEOUT
    simulation.leave(waiter)
    assert (simulation.queue.waiting, simulation.queue.next_tick(simulation.now)) == (0, None)


def test_at_most_sixteen_smaller_requests_overtake_one_that_waits_for_memory() -> None:
    simulation = Simulation(slots=4, queue=40)
    first = simulation.arrive("a1", pages=60)
    large = simulation.arrive("b1", pages=70)
    assert (large.waiting, large.starved) == (True, True)
    passed = 0
    while (small := simulation.arrive("c1", pages=10)).admitted:
        passed += 1
        simulation.leave(small)
    assert passed == 16
    simulation.tick(100)
    assert small.rejected is Reason.TIMEOUT
    assert large.waiting
    assert simulation.leave(first) == ["b1"]


def test_page_reservation_of_a_request_ends_when_the_engine_holds_its_pages() -> None:
    simulation = Simulation(slots=4)
    one = simulation.arrive("a1", pages=60)
    assert simulation.queue.available == 40
    simulation.queue.free = 55
    simulation.queue.hold(one, 45)
    assert simulation.queue.available == 40
    simulation.queue.free = 30
    simulation.queue.hold(one, 70)  # more pages than reserved
    assert simulation.queue.available == 30
    assert simulation.arrive("b1", pages=30).admitted
    assert simulation.queue.available == 0
    simulation.leave(one)
    simulation.queue.free = 100
    assert simulation.queue.available == 70


def test_pages_of_a_prompt_are_not_counted_twice_before_its_first_token() -> None:
    simulation = Simulation(slots=4)
    simulation.arrive("a1", pages=60)
    simulation.queue.free = 45  # the engine holds 55 pages for the request, and has not reported a token
    assert simulation.queue.available == 40
    assert simulation.arrive("b1", pages=40).admitted
    assert simulation.queue.available == 0


def test_pages_shared_by_two_requests_are_counted_once() -> None:
    simulation = Simulation(slots=4)
    for name in ("a1", "a2"):
        simulation.queue.hold(simulation.arrive(name, pages=50), 50)
    simulation.queue.free = 45
    assert simulation.queue.available == 45


def test_periodic_tick_admits_a_request_after_pages_were_freed_without_notice() -> None:
    simulation = Simulation(slots=4)
    simulation.queue.hold(simulation.arrive("a1", pages=60), 60)
    simulation.queue.free = 40
    waiter = simulation.arrive("b1", pages=50)
    assert waiter.waiting
    assert (simulation.queue.next_tick(simulation.now) or 99) < simulation.now + 1
    simulation.queue.free = 60
    assert simulation.tick(0.25) == [waiter]
    assert waiter.admitted


def test_idle_model_admits_a_request_without_waiting_for_memory() -> None:
    simulation = Simulation()
    simulation.queue.free = 0
    assert simulation.arrive("a1", pages=100, min_pages=90).admitted


def test_request_that_needs_more_pages_than_the_cache_has_is_rejected_at_once() -> None:
    assert Simulation().arrive("a1", pages=120, min_pages=101).rejected is Reason.KV_UNSERVABLE
    assert Simulation().arrive("a1", pages=120, min_pages=100).admitted


def test_retry_after_of_a_rejection_follows_the_rate_of_freed_slots() -> None:
    simulation = Simulation(slots=1, queue=10)
    assert simulation.queue.retry_after(simulation.now) == 2
    for _ in range(20):
        ticket = simulation.arrive("a1")
        simulation.now += 0.5
        simulation.leave(ticket)
    inside = simulation.arrive("a1")
    for n in range(9):
        simulation.arrive(f"b{n}")
    assert simulation.queue.retry_after(simulation.now) in (4, 5)
    simulation.now += 61
    assert simulation.queue.retry_after(simulation.now) == 20, "the measured rate expires after 60 s"
    simulation.leave(inside)
    simulation.now += 59
    assert simulation.queue.retry_after(simulation.now) == 120


def test_closing_the_queue_removes_all_waiting_requests() -> None:
    simulation = Simulation(slots=1)
    inside, waiter = simulation.arrive("a1"), simulation.arrive("a2")
    assert simulation.queue.close() == [waiter]
    simulation.leave(waiter)
    simulation.leave(inside)
    assert (simulation.queue.admitted, simulation.queue.waiting, simulation.queue.available) == (0, 0, 100)


@pytest.mark.parametrize("slots", [1, 2, 7])
def test_one_principal_can_hold_all_slots_if_there_are_fewer_than_eight(slots: int) -> None:
    simulation = Simulation(slots=slots, queue=20)
    assert sum(simulation.arrive(f"a{n}").admitted for n in range(9)) == slots
