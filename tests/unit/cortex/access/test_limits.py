"""Rate and concurrency limits of a key, with a manual clock."""

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
def admitted_request(limits: Limits, principal: Principal | None, tokens: int) -> Iterator[Pass]:
    """Enter a request and hold its tokens; it uses 0 tokens unless `spent` is called."""
    with limits.enter(principal) as granted:
        granted.hold_tokens(tokens)
        yield granted


def request(limits: Limits, principal: Principal | None, tokens: int = 1, actual: int = 0) -> None:
    with admitted_request(limits, principal, tokens) as granted:
        granted.spent(actual)


def rejection(limits: Limits, principal: Principal, tokens: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught:
        request(limits, principal, tokens)
    error = caught.value
    assert (error.status, error.code, error.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert error.retry_after is not None and error.retry_after >= 1
    return error


def test_requests_per_minute_are_limited() -> None:
    clock = Clock()
    limits, key = Limits(clock), Principal("a", "k", requests_per_minute=3)
    for _ in range(3):
        request(limits, key)
    assert rejection(limits, key).retry_after == 20
    assert "3 requests a minute" in str(rejection(limits, key))
    clock.now += 19
    assert rejection(limits, key).retry_after == 1
    clock.now += 1
    request(limits, key)
    assert rejection(limits, key).retry_after == 20
    clock.now += 600
    for _ in range(3):
        request(limits, key)
    assert rejection(limits, key).retry_after == 20


def test_estimated_tokens_are_replaced_by_actual_ones() -> None:
    clock = Clock()
    limits, key = Limits(clock), Principal("a", "k", tokens_per_minute=600)
    with admitted_request(limits, key, 500) as granted:
        assert rejection(limits, key, 200).retry_after == 10
        granted.spent(100)
    request(limits, key, 500, actual=700)
    assert rejection(limits, key, 100).retry_after == 30
    clock.now += 30
    request(limits, key, 100)


def test_failed_request_costs_no_tokens() -> None:
    limits, key = Limits(Clock()), Principal("a", "k", tokens_per_minute=100)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError), admitted_request(limits, key, 100):
            raise ZeroDivisionError
    with admitted_request(limits, key, 100):
        rejection(limits, key, 1)


def test_request_above_the_limit_waits_for_an_empty_bucket() -> None:
    clock = Clock()
    limits, key = Limits(clock), Principal("a", "k", tokens_per_minute=100)
    request(limits, key, 1000, actual=400)
    assert rejection(limits, key, 1000).retry_after == 240
    clock.now += 239
    rejection(limits, key, 1000)
    clock.now += 1
    request(limits, key, 1000)


def test_concurrent_requests_are_limited() -> None:
    limits, key, other_key = Limits(Clock()), Principal("a", "k", concurrency=2), Principal("a", "k2", concurrency=1)
    with ExitStack() as open_requests:
        for _ in range(2):
            open_requests.enter_context(admitted_request(limits, key, 5))
        for _ in range(3):
            assert "2 requests at a time" in str(rejection(limits, key))
        request(limits, other_key)
    with admitted_request(limits, key, 1), admitted_request(limits, key, 1):
        rejection(limits, key)


def test_rejected_request_takes_nothing() -> None:
    limits = Limits(Clock())
    key = Principal("a", "k", requests_per_minute=2, tokens_per_minute=10, concurrency=1)
    with admitted_request(limits, key, 10):
        for _ in range(5):
            rejection(limits, key)
    request(limits, key, 10, actual=10)
    assert "tokens a minute" not in str(rejection(limits, key))


def test_requests_count_before_their_tokens_are_known() -> None:
    limits, key = Limits(Clock()), Principal("a", "k", requests_per_minute=2, tokens_per_minute=10, concurrency=1)
    with limits.enter(key), pytest.raises(ApiError, match="1 requests at a time"):
        limits.enter(key)
    with limits.enter(key) as granted:
        granted.hold_tokens(10)
    with pytest.raises(ApiError, match="2 requests a minute"):
        limits.enter(key)


def test_token_bucket_drains_while_the_body_is_read() -> None:
    clock = Clock()
    limits, key = Limits(clock), Principal("a", "k", tokens_per_minute=60)
    request(limits, key, 60, actual=60)
    with limits.enter(key) as granted:
        clock.now += 10
        granted.hold_tokens(10)


def test_rejected_tokens_return_a_retry_after_that_covers_both_limits() -> None:
    clock = Clock()
    limits, key = Limits(clock), Principal("a", "k", requests_per_minute=2, tokens_per_minute=60)
    request(limits, key, 60, actual=60)
    with limits.enter(key) as granted, pytest.raises(ApiError, match="60 tokens a minute") as caught:
        granted.hold_tokens(1)  # the token fits after 1 s, but the next request only after 30 s
    assert caught.value.retry_after == 30
    clock.now += 30
    request(limits, key, 1)


def test_changed_limits_apply_at_once() -> None:
    clock = Clock()
    limits = Limits(clock)
    request(limits, Principal("a", "k", requests_per_minute=1))
    rejection(limits, Principal("a", "k", requests_per_minute=1))
    request(limits, Principal("a", "k", requests_per_minute=2))
    rejection(limits, Principal("a", "k", requests_per_minute=2))
    request(limits, Principal("a", "k"))


def test_rate_limit_headers_show_limit_and_remaining() -> None:
    limits = Limits(Clock())
    key = Principal("a", "k", requests_per_minute=3, tokens_per_minute=100)
    with admitted_request(limits, key, 30) as granted:
        assert granted.headers == [
            (b"x-ratelimit-limit-requests", b"3"),
            (b"x-ratelimit-remaining-requests", b"2"),
            (b"x-ratelimit-limit-tokens", b"100"),
            (b"x-ratelimit-remaining-tokens", b"70"),
        ]
    for unlimited in (None, Principal("a", "k", concurrency=1), Principal("a", "k")):
        with admitted_request(limits, unlimited, 30) as granted:
            assert granted.headers == []


def test_only_idle_keys_are_forgotten() -> None:
    clock = Clock()
    limits, running = Limits(clock), Principal("a", "running", concurrency=1)
    with admitted_request(limits, running, 1):
        for number in range(100):
            request(limits, Principal("a", f"k{number}", requests_per_minute=10))
        assert len(limits) == 101
        clock.now += 61
        request(limits, Principal("a", "last", requests_per_minute=1))
        assert len(limits) == 2
        rejection(limits, running)
    clock.now += 61
    request(limits, Principal("a", "last", requests_per_minute=1))
    assert len(limits) == 1
    request(limits, None)
    request(limits, Principal("a", "free"))
    assert len(limits) == 1


request_sizes = st.lists(st.tuples(st.floats(0, 90), st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=60)


@given(request_sizes, st.integers(1, 20), st.integers(1, 500))
def test_limits_hold_and_retry_after_suffices(request_sizes: list[tuple[float, int, int]], rpm: int, tpm: int) -> None:
    clock, admitted = Clock(), list[tuple[float, int]]()
    limits, key = Limits(clock), Principal("a", "k", requests_per_minute=rpm, tokens_per_minute=tpm)
    for pause, tokens, actual in request_sizes:
        clock.now += pause
        for _ in range(3):  # a request may have to wait for each limit in turn
            try:
                request(limits, key, tokens, actual)
            except ApiError as error:
                assert error.retry_after is not None
                clock.now += error.retry_after
            else:
                admitted.append((clock.now, actual))
                break
        else:
            pytest.fail("refused after the time that it was told to wait")
    minutes = (clock.now - admitted[0][0]) / 60
    assert len(admitted) <= rpm * (1 + minutes) + 1e-6  # the bucket's size plus what drained in the meantime
    assert sum(actual for _, actual in admitted[:-1]) <= tpm * (1 + minutes) + 300
    clock.now += 60 * 301
    with admitted_request(limits, key, 0) as granted:
        assert granted.headers[1::2] == [
            (b"x-ratelimit-remaining-requests", b"%d" % (rpm - 1)),
            (b"x-ratelimit-remaining-tokens", b"%d" % tpm),
        ]
