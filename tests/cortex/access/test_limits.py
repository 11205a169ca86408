"""Limits of a key, with a clock by hand."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.core.errors import ApiError
from helexa.cortex.access.limits import Limits, Pass
from helexa.cortex.access.principal import Principal


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def entered(limits: Limits, principal: Principal | None, tokens: int) -> Iterator[Pass]:
    """Both steps of a request that uses no tokens unless `spent` is called."""
    with limits.enter(principal) as granted:
        granted.hold_tokens(tokens)
        yield granted


def ask(limits: Limits, principal: Principal | None, tokens: int = 1, actual: int = 0) -> None:
    with entered(limits, principal, tokens) as granted:
        granted.spent(actual)


def refused(limits: Limits, principal: Principal, tokens: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(limits, principal, tokens)
    error = caught.value
    assert (error.status, error.code, error.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert error.retry_after is not None and error.retry_after >= 1
    return error


def test_requests_a_minute() -> None:
    clock = Clock()
    limits, key = Limits(clock), Principal("a", "k", requests_per_minute=3)
    for _ in range(3):
        ask(limits, key)
    assert refused(limits, key).retry_after == 20
    assert "3 requests a minute" in str(refused(limits, key))
    clock.now += 19
    assert refused(limits, key).retry_after == 1
    clock.now += 1
    ask(limits, key)
    assert refused(limits, key).retry_after == 20
    clock.now += 600
    for _ in range(3):
        ask(limits, key)
    assert refused(limits, key).retry_after == 20


def test_tokens_are_estimated_then_corrected() -> None:
    clock = Clock()
    limits, key = Limits(clock), Principal("a", "k", tokens_per_minute=600)
    with entered(limits, key, 500) as granted:
        assert refused(limits, key, 200).retry_after == 10
        granted.spent(100)
    ask(limits, key, 500, actual=700)
    assert refused(limits, key, 100).retry_after == 30
    clock.now += 30
    ask(limits, key, 100)


def test_a_request_that_failed_costs_no_tokens() -> None:
    limits, key = Limits(Clock()), Principal("a", "k", tokens_per_minute=100)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError), entered(limits, key, 100):
            raise ZeroDivisionError
    with entered(limits, key, 100):
        refused(limits, key, 1)


def test_more_than_the_whole_limit_waits_for_an_empty_bucket_and_leaves_a_debt() -> None:
    clock = Clock()
    limits, key = Limits(clock), Principal("a", "k", tokens_per_minute=100)
    ask(limits, key, 1000, actual=400)
    assert refused(limits, key, 1000).retry_after == 240
    clock.now += 239
    refused(limits, key, 1000)
    clock.now += 1
    ask(limits, key, 1000)


def test_requests_at_a_time() -> None:
    limits, key, other = Limits(Clock()), Principal("a", "k", concurrency=2), Principal("a", "k2", concurrency=1)
    with ExitStack() as open_requests:
        for _ in range(2):
            open_requests.enter_context(entered(limits, key, 5))
        for _ in range(3):
            assert "2 requests at a time" in str(refused(limits, key))
        ask(limits, other)
    with entered(limits, key, 1), entered(limits, key, 1):
        refused(limits, key)


def test_a_refused_request_takes_nothing() -> None:
    limits = Limits(Clock())
    key = Principal("a", "k", requests_per_minute=2, tokens_per_minute=10, concurrency=1)
    with entered(limits, key, 10):
        for _ in range(5):
            refused(limits, key)
    ask(limits, key, 10, actual=10)
    assert "tokens a minute" not in str(refused(limits, key))


def test_requests_count_before_their_tokens_are_known() -> None:
    limits, key = Limits(Clock()), Principal("a", "k", requests_per_minute=2, tokens_per_minute=10, concurrency=1)
    with limits.enter(key), pytest.raises(ApiError, match="1 requests at a time"):
        limits.enter(key)
    with limits.enter(key) as granted:
        granted.hold_tokens(10)
    with pytest.raises(ApiError, match="2 requests a minute"):
        limits.enter(key)


def test_tokens_drain_while_the_body_is_read() -> None:
    clock = Clock()
    limits, key = Limits(clock), Principal("a", "k", tokens_per_minute=60)
    ask(limits, key, 60, actual=60)
    with limits.enter(key) as granted:
        clock.now += 10
        granted.hold_tokens(10)


def test_rejected_tokens_return_a_retry_after_that_covers_both_limits() -> None:
    clock = Clock()
    limits, key = Limits(clock), Principal("a", "k", requests_per_minute=2, tokens_per_minute=60)
    ask(limits, key, 60, actual=60)
    with limits.enter(key) as granted, pytest.raises(ApiError, match="60 tokens a minute") as caught:
        granted.hold_tokens(1)  # which fits after a second, but then the key has no request left
    assert caught.value.retry_after == 30
    clock.now += 30
    ask(limits, key, 1)


def test_changed_limits_count_at_once() -> None:
    clock = Clock()
    limits = Limits(clock)
    ask(limits, Principal("a", "k", requests_per_minute=1))
    refused(limits, Principal("a", "k", requests_per_minute=1))
    ask(limits, Principal("a", "k", requests_per_minute=2))
    refused(limits, Principal("a", "k", requests_per_minute=2))
    ask(limits, Principal("a", "k"))


def test_headers() -> None:
    limits = Limits(Clock())
    key = Principal("a", "k", requests_per_minute=3, tokens_per_minute=100)
    with entered(limits, key, 30) as granted:
        assert granted.headers == [
            (b"x-ratelimit-limit-requests", b"3"),
            (b"x-ratelimit-remaining-requests", b"2"),
            (b"x-ratelimit-limit-tokens", b"100"),
            (b"x-ratelimit-remaining-tokens", b"70"),
        ]
    for unlimited in (None, Principal("a", "k", concurrency=1), Principal("a", "k")):
        with entered(limits, unlimited, 30) as granted:
            assert granted.headers == []


def test_idle_keys_are_forgotten_and_running_ones_are_not() -> None:
    clock = Clock()
    limits, running = Limits(clock), Principal("a", "running", concurrency=1)
    with entered(limits, running, 1):
        for number in range(100):
            ask(limits, Principal("a", f"k{number}", requests_per_minute=10))
        assert len(limits) == 101
        clock.now += 61
        ask(limits, Principal("a", "last", requests_per_minute=1))
        assert len(limits) == 2
        refused(limits, running)
    clock.now += 61
    ask(limits, Principal("a", "last", requests_per_minute=1))
    assert len(limits) == 1
    ask(limits, None)
    ask(limits, Principal("a", "free"))
    assert len(limits) == 1


wishes = st.lists(st.tuples(st.floats(0, 90), st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=60)


@given(wishes, st.integers(1, 20), st.integers(1, 500))
def test_never_too_much_and_retry_after_is_honest(wishes: list[tuple[float, int, int]], rpm: int, tpm: int) -> None:
    clock, let_in = Clock(), list[tuple[float, int]]()
    limits, key = Limits(clock), Principal("a", "k", requests_per_minute=rpm, tokens_per_minute=tpm)
    for pause, tokens, actual in wishes:
        clock.now += pause
        for _ in range(3):  # it may have to wait for both limits, one after the other
            try:
                ask(limits, key, tokens, actual)
            except ApiError as error:
                assert error.retry_after is not None
                clock.now += error.retry_after
            else:
                let_in.append((clock.now, actual))
                break
        else:
            pytest.fail("refused after the time that it was told to wait")
    minutes = (clock.now - let_in[0][0]) / 60
    assert len(let_in) <= rpm * (1 + minutes) + 1e-6  # a bucket's size, and what drained meanwhile
    assert sum(actual for _, actual in let_in[:-1]) <= tpm * (1 + minutes) + 300
    clock.now += 60 * 301
    with entered(limits, key, 0) as granted:
        assert granted.headers[1::2] == [
            (b"x-ratelimit-remaining-requests", b"%d" % (rpm - 1)),
            (b"x-ratelimit-remaining-tokens", b"%d" % tpm),
        ]
