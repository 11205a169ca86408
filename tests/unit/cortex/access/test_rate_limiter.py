"""Rate and concurrency limits of a key, with a manual clock."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.core.errors import ApiError
from helexa.cortex.access.keys import Principal
from helexa.cortex.access.rate_limiter import RateLimiter, RateLimitPermit


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def admitted_request(limiter: RateLimiter, principal: Principal | None, tokens: int) -> Iterator[RateLimitPermit]:
    """Enter a request and hold its tokens; it uses 0 tokens unless `spent` is called."""
    with limiter.enter(principal) as permit:
        permit.hold_tokens(tokens)
        yield permit


def request(limiter: RateLimiter, principal: Principal | None, tokens: int = 1, actual: int = 0) -> None:
    with admitted_request(limiter, principal, tokens) as permit:
        permit.spent(actual)


def rejection(limiter: RateLimiter, principal: Principal, tokens: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught:
        request(limiter, principal, tokens)
    error = caught.value
    assert (error.status, error.code, error.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert error.retry_after is not None and error.retry_after >= 1
    return error


def test_request_above_the_requests_per_minute_of_a_key_is_rejected() -> None:
    clock = Clock()
    limiter, key = RateLimiter(clock), Principal("a", "k", requests_per_minute=3)
    for _ in range(3):
        request(limiter, key)
    assert rejection(limiter, key).retry_after == 20
    assert "3 requests a minute" in str(rejection(limiter, key))
    clock.now += 19
    assert rejection(limiter, key).retry_after == 1
    clock.now += 1
    request(limiter, key)
    assert rejection(limiter, key).retry_after == 20
    clock.now += 600
    for _ in range(3):
        request(limiter, key)
    assert rejection(limiter, key).retry_after == 20


def test_token_rate_limit_is_corrected_to_the_actual_tokens_after_the_request() -> None:
    clock = Clock()
    limiter, key = RateLimiter(clock), Principal("a", "k", tokens_per_minute=600)
    with admitted_request(limiter, key, 500) as permit:
        assert rejection(limiter, key, 200).retry_after == 10
        permit.spent(100)
    request(limiter, key, 500, actual=700)
    assert rejection(limiter, key, 100).retry_after == 30
    clock.now += 30
    request(limiter, key, 100)


def test_failed_request_uses_no_tokens_of_the_token_rate_limit() -> None:
    limiter, key = RateLimiter(Clock()), Principal("a", "k", tokens_per_minute=100)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError), admitted_request(limiter, key, 100):
            raise ZeroDivisionError
    with admitted_request(limiter, key, 100):
        rejection(limiter, key, 1)


def test_request_for_more_tokens_than_the_rate_limit_is_admitted_if_no_tokens_are_in_use() -> None:
    clock = Clock()
    limiter, key = RateLimiter(clock), Principal("a", "k", tokens_per_minute=100)
    request(limiter, key, 1000, actual=400)
    assert rejection(limiter, key, 1000).retry_after == 240
    clock.now += 239
    rejection(limiter, key, 1000)
    clock.now += 1
    request(limiter, key, 1000)


def test_request_above_the_concurrency_limit_of_a_key_is_rejected() -> None:
    limiter, key, other_key = (
        RateLimiter(Clock()),
        Principal("a", "k", concurrency=2),
        Principal("a", "k2", concurrency=1),
    )
    with ExitStack() as open_requests:
        for _ in range(2):
            open_requests.enter_context(admitted_request(limiter, key, 5))
        for _ in range(3):
            assert "2 requests at a time" in str(rejection(limiter, key))
        request(limiter, other_key)
    with admitted_request(limiter, key, 1), admitted_request(limiter, key, 1):
        rejection(limiter, key)


def test_rejected_request_uses_up_nothing_of_any_rate_limit() -> None:
    limiter = RateLimiter(Clock())
    key = Principal("a", "k", requests_per_minute=2, tokens_per_minute=10, concurrency=1)
    with admitted_request(limiter, key, 10):
        for _ in range(5):
            rejection(limiter, key)
    request(limiter, key, 10, actual=10)
    assert "tokens a minute" not in str(rejection(limiter, key))


def test_requests_count_for_request_limits_before_their_tokens_are_known() -> None:
    limiter, key = RateLimiter(Clock()), Principal("a", "k", requests_per_minute=2, tokens_per_minute=10, concurrency=1)
    with limiter.enter(key), pytest.raises(ApiError, match="1 requests at a time"):
        limiter.enter(key)
    with limiter.enter(key) as permit:
        permit.hold_tokens(10)
    with pytest.raises(ApiError, match="2 requests a minute"):
        limiter.enter(key)


def test_token_bucket_refills_while_the_request_body_is_read() -> None:
    clock = Clock()
    limiter, key = RateLimiter(clock), Principal("a", "k", tokens_per_minute=60)
    request(limiter, key, 60, actual=60)
    with limiter.enter(key) as permit:
        clock.now += 10
        permit.hold_tokens(10)


def test_retry_after_of_a_rejection_by_tokens_also_covers_the_request_limit() -> None:
    clock = Clock()
    limiter, key = RateLimiter(clock), Principal("a", "k", requests_per_minute=2, tokens_per_minute=60)
    request(limiter, key, 60, actual=60)
    with limiter.enter(key) as permit, pytest.raises(ApiError, match="60 tokens a minute") as caught:
        permit.hold_tokens(1)  # the token fits after 1 s, but the next request only after 30 s
    assert caught.value.retry_after == 30
    clock.now += 30
    request(limiter, key, 1)


def test_changed_rate_limits_apply_at_once() -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    request(limiter, Principal("a", "k", requests_per_minute=1))
    rejection(limiter, Principal("a", "k", requests_per_minute=1))
    request(limiter, Principal("a", "k", requests_per_minute=2))
    rejection(limiter, Principal("a", "k", requests_per_minute=2))
    request(limiter, Principal("a", "k"))


def test_rate_limit_headers_show_limits_and_remaining_requests_and_tokens() -> None:
    limiter = RateLimiter(Clock())
    key = Principal("a", "k", requests_per_minute=3, tokens_per_minute=100)
    with admitted_request(limiter, key, 30) as permit:
        assert permit.headers == [
            (b"x-ratelimit-limit-requests", b"3"),
            (b"x-ratelimit-remaining-requests", b"2"),
            (b"x-ratelimit-limit-tokens", b"100"),
            (b"x-ratelimit-remaining-tokens", b"70"),
        ]
    for unlimited in (None, Principal("a", "k", concurrency=1), Principal("a", "k")):
        with admitted_request(limiter, unlimited, 30) as permit:
            assert permit.headers == []


def test_rate_limiter_drops_the_state_of_idle_keys_only() -> None:
    clock = Clock()
    limiter, running = RateLimiter(clock), Principal("a", "running", concurrency=1)
    with admitted_request(limiter, running, 1):
        for number in range(100):
            request(limiter, Principal("a", f"k{number}", requests_per_minute=10))
        assert len(limiter) == 101
        clock.now += 61
        request(limiter, Principal("a", "last", requests_per_minute=1))
        assert len(limiter) == 2
        rejection(limiter, running)
    clock.now += 61
    request(limiter, Principal("a", "last", requests_per_minute=1))
    assert len(limiter) == 1
    request(limiter, None)
    request(limiter, Principal("a", "free"))
    assert len(limiter) == 1


request_sizes = st.lists(st.tuples(st.floats(0, 90), st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=60)


@given(request_sizes, st.integers(1, 20), st.integers(1, 500))
def test_rate_limits_hold_and_a_retry_after_the_stated_time_is_admitted(
    request_sizes: list[tuple[float, int, int]], rpm: int, tpm: int
) -> None:
    clock, admitted = Clock(), list[tuple[float, int]]()
    limiter, key = RateLimiter(clock), Principal("a", "k", requests_per_minute=rpm, tokens_per_minute=tpm)
    for pause, tokens, actual in request_sizes:
        clock.now += pause
        for _ in range(3):  # a request may have to wait for each limit in turn
            try:
                request(limiter, key, tokens, actual)
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
    with admitted_request(limiter, key, 0) as permit:
        assert permit.headers[1::2] == [
            (b"x-ratelimit-remaining-requests", b"%d" % (rpm - 1)),
            (b"x-ratelimit-remaining-tokens", b"%d" % tpm),
        ]
