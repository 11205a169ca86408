"""The gate as a state machine: whose turn it is, who is turned away, and that nothing is left behind."""

from dataclasses import replace

import pytest

from helexa.neuron.admission.fair_queue import ANONYMOUS, Gate, Limits, Reason, Ticket

LIMITS = Limits(seats=2, queue=4, wait=30, kv_wait=240, per_principal=0, anon_seats=2, anon_pending=100, pages=100)


class Door:
    """A gate, a clock, and who is where."""

    def __init__(self, **limits: int) -> None:
        self.gate = Gate(replace(LIMITS, **limits))
        self.now = 0.0
        self.order: list[str] = []

    def come(self, name: str, pages: int = 1, least: int = 0) -> Ticket:
        ticket = Ticket(principal=name.rstrip("0123456789"), pages=pages, least=least or pages)
        ticket.name = name  # type: ignore[attr-defined]
        self._note(self.gate.arrive(ticket, self.now))
        return ticket

    def go(self, *tickets: Ticket) -> list[str]:
        """They leave; the names of those who went in for it."""
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


def test_whoever_comes_goes_in_until_the_seats_are_taken() -> None:
    door = Door()
    one, two, three = door.come("a1"), door.come("b1"), door.come("c1")
    assert (one.inside, two.inside, three.inside, three.waiting) == (True, True, False, True)
    assert door.go(one) == ["c1"]
    assert (door.gate.inside, door.gate.waiting) == (2, 0)


def test_principals_take_turns_however_many_requests_each_has() -> None:
    door = Door(seats=1, queue=20)
    inside = door.come("a0")
    waiters = {ticket.name: ticket for ticket in [door.come(f"a{n}") for n in range(1, 6)]}  # type: ignore[attr-defined]
    waiters |= {name: door.come(name) for name in ("b1", "b2", "c1")}
    order: list[str] = []
    for _ in range(len(waiters)):
        (name,) = door.go(inside)
        inside = waiters[name]
        order.append(name)
    assert [name for name in order if name.startswith("a")] == ["a1", "a2", "a3", "a4", "a5"]
    assert set(order[:3]) >= {"b1", "c1"}, "newcomers go before those who had a turn"
    assert order.index("b2") <= 4


def test_a_turn_costs_what_it_takes() -> None:
    door = Door(seats=1, queue=40)
    inside = door.come("x0")
    waiters = {f"a{n}": door.come(f"a{n}", pages=30) for n in range(1, 5)}
    waiters |= {f"b{n}": door.come(f"b{n}", pages=10) for n in range(1, 13)}
    order: list[str] = []
    for _ in range(8):
        (name,) = door.go(inside)
        inside = waiters[name]
        order.append(name[0])
    assert order.count("b") == 6
    assert order.count("a") == 2


def test_one_principal_leaves_a_seat_of_many_to_others() -> None:
    door = Door(seats=8, queue=20)
    heavy = [door.come(f"a{n}") for n in range(20)]
    assert sum(ticket.inside for ticket in heavy) == 7
    assert door.come("b1").inside
    assert door.come("c1").waiting
    assert door.go(heavy[0], heavy[1]) == ["a7", "c1"]


def test_anonymous_callers_go_in_only_while_nobody_else_waits() -> None:
    door = Door(seats=1)
    inside, anonymous, known = door.come("a1"), door.come("1"), door.come("b1")
    assert anonymous.principal == ANONYMOUS
    assert door.go(inside) == ["b1"]
    assert door.go(known) == ["1"]
    assert door.gate.seated(ANONYMOUS) == 1


def test_anonymous_callers_have_ceilings_of_their_own() -> None:
    door = Door(anon_seats=1, anon_pending=2)
    one, two, three = door.come("1"), door.come("2"), door.come("3")
    assert (one.inside, two.waiting, three.refused) == (True, True, Reason.ANON_YIELD)
    assert door.come("a1").inside
    assert Door(anon_seats=0).come("1").refused is Reason.ANON_YIELD


def test_an_anonymous_waiter_gives_its_place_to_an_identified_one() -> None:
    door = Door(seats=1, queue=2)
    door.come("a1")
    old, new, known = door.come("1"), door.come("2"), door.come("a2")
    assert (old.waiting, new.refused, known.waiting) == (True, Reason.ANON_YIELD, True)
    assert door.come("3").refused is Reason.QUEUE_FULL


def test_who_fills_the_queue_makes_room_for_others() -> None:
    door = Door(seats=1, queue=3)
    door.come("a0")
    waiters = [door.come(f"a{n}") for n in range(1, 4)]
    other = door.come("b1")
    assert (other.waiting, waiters[2].refused) == (True, Reason.QUEUE_FULL)
    assert door.come("a9").refused is Reason.QUEUE_FULL
    assert door.come("b2").refused is Reason.QUEUE_FULL, "two of three places would be no more than a has"
    assert door.gate.refusals[Reason.QUEUE_FULL] == 3


def test_a_cap_per_principal_is_none_for_the_others() -> None:
    door = Door(per_principal=2, seats=1, queue=9)
    door.come("a1"), door.come("a2")
    assert door.come("a3").refused is Reason.PER_PRINCIPAL
    assert door.come("b1").waiting
    assert [door.come(str(n)).refused for n in range(3)] == [None] * 3


def test_waiting_has_an_end() -> None:
    door = Door(seats=1)
    door.come("a1")
    waiter = door.come("a2")
    assert door.gate.next_tick(door.now) == 30
    assert door.tick(29.9) == []
    assert door.tick(0.2) == [waiter]
    assert waiter.refused is Reason.TIMEOUT
    door.go(waiter)
    assert (door.gate.waiting, door.gate.next_tick(door.now)) == (0, None)


def test_who_lacks_memory_waits_longer_and_smaller_ones_pass_for_a_while() -> None:
    door = Door(seats=4, queue=40)
    first = door.come("a1", pages=60)
    large = door.come("b1", pages=70)
    assert (large.waiting, large.starved) == (True, True)
    passed = 0
    while (small := door.come("c1", pages=10)).inside:
        passed += 1
        door.go(small)
    assert passed == 16
    door.tick(100)
    assert small.refused is Reason.TIMEOUT
    assert large.waiting
    assert door.go(first) == ["b1"]


def test_memory_is_promised_until_it_is_held() -> None:
    door = Door(seats=4)
    one = door.come("a1", pages=60)
    assert door.gate.available == 40
    door.gate.free = 55
    door.gate.hold(one, 45)
    assert door.gate.available == 40
    door.gate.free = 30
    door.gate.hold(one, 70)  # more than it was promised
    assert door.gate.available == 30
    assert door.come("b1", pages=30).inside
    assert door.gate.available == 0
    door.go(one)
    door.gate.free = 100
    assert door.gate.available == 70


def test_memory_of_a_prompt_that_is_being_read_counts_once() -> None:
    door = Door(seats=4)
    door.come("a1", pages=60)
    door.gate.free = 45  # the engine holds 55 of them, and has not said a token
    assert door.gate.available == 40
    assert door.come("b1", pages=40).inside
    assert door.gate.available == 0


def test_memory_that_several_share_is_free_for_others() -> None:
    door = Door(seats=4)
    for name in ("a1", "a2"):
        door.gate.hold(door.come(name, pages=50), 50)
    door.gate.free = 45
    assert door.gate.available == 45


def test_memory_that_comes_free_unasked_is_noticed() -> None:
    door = Door(seats=4)
    door.gate.hold(door.come("a1", pages=60), 60)
    door.gate.free = 40
    waiter = door.come("b1", pages=50)
    assert waiter.waiting
    assert (door.gate.next_tick(door.now) or 99) < door.now + 1
    door.gate.free = 60
    assert door.tick(0.25) == [waiter]
    assert waiter.inside


def test_nobody_waits_for_memory_before_an_empty_model() -> None:
    door = Door()
    door.gate.free = 0
    assert door.come("a1", pages=100, least=90).inside


def test_what_can_never_fit_is_told_at_once() -> None:
    assert Door().come("a1", pages=120, least=101).refused is Reason.KV_UNSERVABLE
    assert Door().come("a1", pages=120, least=100).inside


def test_the_time_to_retry_follows_the_seats_that_came_free() -> None:
    door = Door(seats=1, queue=10)
    assert door.gate.retry_after(door.now) == 2
    for _ in range(20):
        ticket = door.come("a1")
        door.now += 0.5
        door.go(ticket)
    inside = door.come("a1")
    for n in range(9):
        door.come(f"b{n}")
    assert door.gate.retry_after(door.now) in (4, 5)
    door.now += 61
    assert door.gate.retry_after(door.now) == 20, "nothing is known any more"
    door.go(inside)
    door.now += 59
    assert door.gate.retry_after(door.now) == 120


def test_closing_sends_everybody_away_who_waits() -> None:
    door = Door(seats=1)
    inside, waiter = door.come("a1"), door.come("a2")
    assert door.gate.close() == [waiter]
    door.go(waiter)
    door.go(inside)
    assert (door.gate.inside, door.gate.waiting, door.gate.available) == (0, 0, 100)


@pytest.mark.parametrize("seats", [1, 2, 7])
def test_of_few_seats_one_principal_may_have_all(seats: int) -> None:
    door = Door(seats=seats, queue=20)
    assert sum(door.come(f"a{n}").inside for n in range(9)) == seats
