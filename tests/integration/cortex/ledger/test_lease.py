"""Sizes and growth of leases, without a database."""

from hypothesis import given
from hypothesis import strategies as st

from cortex.ledger.ledger_helpers import holder
from helexa.cortex.access.keys import Window
from helexa.cortex.ledger.gateways import DeadGatewayDetector
from helexa.cortex.ledger.leases_windows_and_over_budget import CLOCK_SKEW_SECS, Lease, grant, over_budget, window_at

HOUR = Window("rolling", 3600)


def test_rolling_budget_window_starts_when_the_previous_window_has_ended():
    assert window_at(Window(), 0, 5000.5) == 0
    assert window_at(HOUR, 0, 5000.5) == 5000
    assert window_at(HOUR, 5000, 8599.9) == 5000
    assert window_at(HOUR, 5000, 8600.0) == 8600
    assert window_at(HOUR, 5000, 20000.0) == 20000


def test_lease_takes_fewer_tokens_in_advance_near_the_cap():
    assert grant(1_000_000, [100]) == 100 + 256 * 100
    assert grant(1_000, [100]) == 100 + 900 // 8
    assert grant(100, [100]) == 100
    assert grant(99, [100]) == 0
    assert grant(-5, [1]) == 0


def test_reservations_above_the_remaining_tokens_are_skipped_and_smaller_ones_granted():
    assert grant(100, [90, 50, 10]) == 100


@given(st.integers(-10, 10_000), st.lists(st.integers(1, 2_000), max_size=20))
def test_tokens_granted_to_leases_are_at_most_the_available_tokens(available: int, requested: list[int]):
    assert 0 <= grant(available, requested) <= max(0, available)


def test_lease_covers_only_reservations_within_its_tokens_window_and_cap():
    lease = Lease("key", 1000, HOUR, 4600.0, 100, granted=50, spent=20, reserved=10)
    assert lease.has(holder(100, window=HOUR), 20, 4599.0)
    assert not lease.has(holder(100, window=HOUR), 21, 4599.0)
    assert not lease.has(holder(100, window=HOUR), 20, 4600.0)
    assert not lease.has(holder(99, window=HOUR), 20, 4599.0)
    assert not lease.has(holder(100, window=Window("rolling", 60)), 20, 4599.0)


def test_lease_for_a_future_budget_window_is_valid_only_within_the_clock_skew():
    lease = Lease("key", 1000, HOUR, 4600.0, 100, granted=50)
    assert lease.has(holder(100, window=HOUR), 20, 1000.0 - CLOCK_SKEW_SECS)
    assert not lease.has(holder(100, window=HOUR), 20, 999.0 - CLOCK_SKEW_SECS)


def test_tokens_spent_above_the_lease_are_repaid_before_tokens_become_free():
    lease = Lease("key", 0, Window(), float("inf"), 200, granted=100, reserved=100)
    lease.settle(50, 90)
    assert (lease.granted, lease.spent, lease.reserved, lease.debt, lease.free) == (140, 90, 50, 40, 0)
    lease.settle(25, 10)
    assert (lease.granted, lease.debt, lease.free) == (125, 25, 0)
    lease.settle(25, 0)
    assert (lease.granted, lease.debt, lease.free) == (100, 0, 0)
    lease.reserved, lease.granted = 20, 120
    lease.settle(20, 5)
    assert (lease.granted, lease.debt, lease.free) == (120, 0, 15)


def test_over_budget_error_has_retry_after_only_for_a_rolling_window():
    balance = over_budget(holder(100), 60, 40, float("inf"), 0.0)
    assert (balance.status, balance.type, balance.code) == (429, "insufficient_quota", "insufficient_quota")
    assert balance.headers() == {}
    assert "40 of the key's 100 tokens" in str(balance)
    rolling = over_budget(holder(100, window=HOUR), 60, 40, 4600.0, 4588.5)
    assert (rolling.status, rolling.type, rolling.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert rolling.headers() == {"Retry-After": "12"}
    assert over_budget(holder(100, window=HOUR), 60, 40, 4600.0, 4600.0).headers() == {"Retry-After": "1"}


def test_gateway_without_heartbeats_is_declared_dead_after_the_timeout():
    detector = DeadGatewayDetector(10.0)
    assert detector.find_dead([(1, 5), (2, 9)], 100.0) == []
    assert detector.find_dead([(1, 5), (2, 10)], 109.0) == []
    assert detector.find_dead([(1, 5), (2, 10)], 110.0) == [(1, 5)]
    assert detector.find_dead([(2, 10), (3, 0)], 118.9) == []
    assert detector.find_dead([(2, 10), (3, 0)], 119.0) == [(2, 10)]


def test_pause_of_the_gateway_that_detects_dead_gateways_marks_no_gateway_as_dead():
    detector = DeadGatewayDetector(10.0)
    assert detector.find_dead([(1, 5)], 100.0) == []
    assert detector.find_dead([(1, 5)], 110.0) == []
    assert detector.find_dead([(1, 5)], 119.0) == []
    assert detector.find_dead([(1, 5)], 120.0) == [(1, 5)]
