"""Circuit breakers with a scripted clock."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from helexa.core.node_reports import ModelInfo
from helexa.cortex.config import NeuronSection, RoutingSection
from helexa.cortex.fleet.breaker import ANY, COOLDOWN_SECS, MAX_BREAKERS, Breaker, Breakers
from helexa.cortex.fleet.ejection import Requester
from helexa.cortex.fleet.fleet import MAX_BUSY_SECS, Fleet, Report

PAIR = ("n1", "M")
KEY = (*PAIR, ANY)
RESET = 10.0


def failed(times: int, now: float = 0.0, breaker: Breaker | None = None) -> Breaker:
    breaker = breaker or Breaker()
    for _ in range(times):
        breaker = breaker.failed(now, 3, RESET)
    return breaker


def test_breaker_opens_after_the_configured_number_of_consecutive_failures() -> None:
    assert failed(2).state(0) == "closed"
    assert failed(3).state(0) == "open"
    assert failed(2, breaker=failed(2).ok(0)).state(0) == "closed"


def test_open_breaker_admits_one_probe_after_the_reset_time() -> None:
    breaker = failed(3)
    assert breaker.state(RESET - 0.01) == "open"
    assert breaker.state(RESET) == "half-open"
    probing = breaker.began(RESET)
    assert probing.probing and probing.state(RESET) == "open"
    assert not breaker.began(RESET - 0.01).probing


def test_result_of_the_probe_closes_or_reopens_the_breaker() -> None:
    probing = failed(3).began(RESET)
    assert probing.ok(RESET).state(RESET) == "closed"
    again = probing.failed(RESET, 3, RESET)
    assert again.state(2 * RESET - 0.01) == "open"
    assert again.state(2 * RESET) == "half-open"
    assert probing.ended().state(RESET) == "half-open"  # the probe's client disconnected: no result


def test_results_of_earlier_requests_do_not_close_an_open_breaker() -> None:
    opened = failed(3)
    assert opened.ok(1.0).state(1.0) == "open"
    assert failed(5, 1.0, opened).state(RESET) == "half-open"


def test_node_is_less_preferred_during_a_cooldown_after_an_error_or_busy_response() -> None:
    breakers = Breakers(3, RESET)
    breakers.failed(PAIR, 0.0)
    assert (breakers.cooling_down(COOLDOWN_SECS / 2), breakers.changes_at(COOLDOWN_SECS / 2)) == ({PAIR}, COOLDOWN_SECS)
    assert breakers.cooling_down(COOLDOWN_SECS) == frozenset()
    breakers.busy(PAIR, 5.0, 2.0)
    breakers.ok(PAIR, 5.5)
    assert breakers.cooling_down(6.0) == {PAIR}
    breakers.ok(PAIR, 8.0)
    assert PAIR not in breakers


moves = st.lists(st.tuples(st.sampled_from(["ok", "fault", "began", "ended", "busy", "wait"]), st.floats(0, 8)))


@given(moves, st.integers(1, 5))
def test_breaker_admits_one_probe_at_a_time_and_recovers_after_random_events(events: Any, failures: int) -> None:
    breakers, now, probes = Breakers(failures, RESET), 0.0, 0
    consecutive_faults = 0
    for move, secs in events:
        was_open = KEY in breakers.open(now)
        if move == "wait":
            now += secs
        elif move == "began":
            probe = breakers.began(PAIR, now)
            assert not (probe and was_open)
            probes += len(probe)
        elif move == "ended" and probes:
            breakers.ended([KEY], now)
            probes = 0
        elif move == "ok":
            breakers.ok(PAIR, now)
            consecutive_faults = 0
            probes = 0 if KEY not in breakers.open(now) else probes
        elif move == "fault":
            consecutive_faults += 1
            state = breakers.failed(PAIR, now)
            probes = 0
            assert state == "open" or consecutive_faults < failures
        elif move == "busy":
            breakers.busy(PAIR, now, secs)
            assert (KEY in breakers.open(now)) is was_open
        assert probes <= 1
        assert now < breakers.changes_at(now)
    breakers.ended([KEY], now)
    assert KEY not in breakers.open(now + RESET)
    assert not breakers.cooling_down(now + RESET)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def fleet_with(clock: Clock, **settings: Any) -> Fleet:
    fleet = Fleet([NeuronSection(name="n1", endpoint="http://n1")], RoutingSection(**settings), clock)
    fleet.answered("n1", Report(models={"M": ModelInfo(id="M")}), clock.now)
    return fleet


def test_open_breaker_is_listed_in_the_fleet_view_until_it_closes() -> None:
    clock = Clock()
    fleet = fleet_with(clock, breaker_failures=2, breaker_reset_secs=RESET)
    fleet.transport_failed("n1", "M")
    assert (fleet.view().open, fleet.view().cooling_down) == (frozenset(), {PAIR})
    fleet.transport_failed("n1", "M")
    assert fleet.view().open == {KEY}
    clock.now += RESET
    assert fleet.view().open == frozenset()
    with fleet.request("n1", "M"):
        assert fleet.view().open == {KEY}  # the probe is in progress
    assert fleet.view().open == frozenset()  # the probe had no result
    with fleet.request("n1", "M"):
        fleet.transport_ok("n1", "M")
        assert fleet.view().open == frozenset()
    fleet.transport_failed("n1", "M")
    assert fleet.view().open == frozenset()  # closed: two faults are needed again


def test_cooldown_after_a_busy_response_is_bounded() -> None:
    clock = Clock()
    fleet = fleet_with(clock)
    fleet.busy("n1", "M", 1e9)
    assert (fleet.view().cooling_down, fleet.view().open) == ({PAIR}, frozenset())
    clock.now += MAX_BUSY_SECS
    assert fleet.view().cooling_down == frozenset()


def test_breakers_of_removed_models_and_nodes_are_deleted() -> None:
    clock = Clock()
    fleet = fleet_with(clock, breaker_failures=1)
    fleet.transport_failed("n1", "M")
    fleet.transport_failed("nobody", "M")
    assert fleet.view().open == {KEY}
    fleet.answered("n1", Report(models={}), clock.now)
    assert fleet.view().open == frozenset()
    fleet.transport_failed("n1", "M")
    fleet.configure([])
    assert fleet.view().open == frozenset()


def test_breaker_of_a_node_resets_when_the_node_comes_back_up() -> None:
    clock = Clock()
    fleet = fleet_with(clock, breaker_failures=1)
    fleet.transport_failed("n1", "M")
    for _ in range(2):
        fleet.missed("n1", "slow")
    fleet.answered("n1", Report(models={"M": ModelInfo(id="M")}), clock.now)
    assert fleet.view().open == {KEY}
    for _ in range(3):
        fleet.missed("n1", "gone")
    fleet.answered("n1", Report(models={"M": ModelInfo(id="M")}), clock.now)
    assert fleet.view().open == frozenset()


def test_failures_of_one_client_open_the_breaker_only_for_this_client() -> None:
    clock = Clock()
    fleet = fleet_with(clock, breaker_failures=3)
    for _ in range(9):
        fleet.transport_failed("n1", "M", "eve")
    assert fleet.view().open == {("n1", "M", "eve")}
    fleet.transport_ok("n1", "M", "bob")
    fleet.transport_failed("n1", "M", "eve")
    fleet.transport_failed("n1", "M", "eve")
    fleet.transport_failed("n1", "M", "bob")
    assert fleet.view().open == {("n1", "M", "eve"), ("n1", "M", ANY)}  # requests of two clients failed in a row


def test_failures_of_one_client_open_the_breaker_for_all_if_polls_fail_too() -> None:
    fleet = fleet_with(Clock(), breaker_failures=1)
    fleet.missed("n1", "refused")
    fleet.transport_failed("n1", "M", "bob")
    assert ("n1", "M", ANY) in fleet.view().open


def test_breaker_of_one_client_admits_a_probe_of_this_client() -> None:
    clock = Clock()
    fleet = fleet_with(clock, breaker_failures=1, breaker_reset_secs=RESET)
    fleet.transport_failed("n1", "M", "eve")
    clock.now += RESET
    assert not fleet.view().open
    with fleet.request("n1", "M", Requester("eve")):
        assert fleet.view().open == {("n1", "M", "eve")}
        fleet.transport_ok("n1", "M", "eve")
        assert not fleet.view().open


def test_number_of_stored_breakers_stays_below_a_maximum() -> None:
    breakers = Breakers(1, RESET)
    breakers.failed(("other node", "M"), 0.0)
    for number in range(3 * MAX_BREAKERS):
        breakers.failed(PAIR, 0.0, f"client {number}")
    assert len(breakers.open(0.0)) == MAX_BREAKERS
    assert ("other node", "M", ANY) in breakers.open(0.0)
    assert (*PAIR, ANY) in breakers.open(0.0)
