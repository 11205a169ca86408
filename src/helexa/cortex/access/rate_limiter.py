"""Limits of requests and tokens per minute and of concurrency, for each key."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from helexa.core.errors import ApiError, overloaded
from helexa.cortex.access.keys import Principal
from helexa.http.headers import Headers

_MINUTE = 60.0
_TOLERANCE = 1e-6


@dataclass
class _Bucket:
    """Leaky bucket that implements one limit of requests or tokens per minute.

    Each request adds an amount: 1, or the number of its tokens. The bucket drains continuously. The amount that drains
    per minute is the limit.
    """

    used: float = 0.0

    def drain(self, limit: int | None, seconds: float) -> None:
        self.used = 0.0 if limit is None else max(0.0, self.used - seconds * limit / _MINUTE)

    def wait(self, limit: int | None, amount: float) -> float:
        """Return the seconds until `amount` fits into the bucket; 0.0 if it fits now.

        An `amount` above the limit fits only into an empty bucket, and then fills the bucket above the limit.
        """
        excess = 0.0 if limit is None else self.used + min(amount, limit) - limit
        return 0.0 if limit is None or excess < _TOLERANCE else excess * _MINUTE / limit

    def remaining(self, limit: int) -> int:
        return max(0, math.floor(limit - self.used))


@dataclass
class _KeyUsage:
    updated_at: float
    running: int = 0
    requests: _Bucket = field(default_factory=_Bucket)
    tokens: _Bucket = field(default_factory=_Bucket)

    def drain(self, principal: Principal, now: float) -> None:
        elapsed_secs, self.updated_at = max(0.0, now - self.updated_at), now
        self.requests.drain(principal.requests_per_minute, elapsed_secs)
        self.tokens.drain(principal.tokens_per_minute, elapsed_secs)


class RateLimitPermit:
    """One admitted request, which counts against the rate limits of its key.

    The request counts as running until `answered` is called or the `with` block ends. If the key has no limits, the
    methods do nothing.
    """

    __slots__ = ("_actual", "_clock", "_principal", "_reserved", "_running", "_usage")

    def __init__(
        self, clock: Callable[[], float], principal: Principal | None = None, usage: _KeyUsage | None = None
    ) -> None:
        self._clock, self._principal, self._usage = clock, principal, usage
        self._reserved = self._actual = 0
        self._running = usage is not None

    def hold_tokens(self, tokens: int) -> None:
        """Count `tokens`, the most that the request can use, against the key's limit.

        Call this method at most once per request.

        Raises:
            ApiError: 429 if the limit is exceeded, with the seconds after which the same request would be admitted.
        """
        principal, usage = self._principal, self._usage
        if principal is None or usage is None or principal.tokens_per_minute is None:
            return
        usage.drain(principal, self._clock())
        if wait := usage.tokens.wait(principal.tokens_per_minute, tokens):
            wait = max(wait, usage.requests.wait(principal.requests_per_minute, 1))
            raise _limit_error(
                f"this API key is limited to {principal.tokens_per_minute} tokens a minute, and this request may "
                f"take {tokens}",
                wait,
            )
        self._reserved = tokens
        usage.tokens.used += tokens

    @property
    def headers(self) -> Headers:
        """The `x-ratelimit-*` response headers: limits and remaining amounts of the key."""
        principal, usage = self._principal, self._usage
        return [] if principal is None or usage is None else _headers(principal, usage)

    def spent(self, tokens: int) -> None:
        """Set the number of used tokens, which is 0 before the first call.

        When the `with` block ends, the used tokens replace the held tokens.
        """
        self._actual = tokens

    def answered(self) -> None:
        """Stop counting the request as running, because its response is complete."""
        # The client can then send its next request before the tokens of this request are charged.
        if self._running and self._usage is not None:
            self._usage.running -= 1
        self._running = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.answered()
        usage = self._usage
        if usage is not None:
            usage.tokens.used = max(0.0, usage.tokens.used + self._actual - self._reserved)


class RateLimiter:
    """Admits requests within the rate limits of their keys, in two steps:

    1. `enter` is called before the request body is read. It checks the number of concurrent requests and the requests
       per minute. An admitted request counts against both limits, even if it is rejected later.
    2. `RateLimitPermit.hold_tokens` is called after the request body is parsed. It checks the tokens per minute.

    A limit of N per minute is a leaky bucket: it allows a burst of N requests at the same time, and N requests per
    minute after the burst. Only keys with a limit and recent requests have an entry in memory.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage_by_key: dict[str, tuple[Principal, _KeyUsage]] = {}
        self._pruned_at = clock()

    def __len__(self) -> int:
        """Return the number of keys whose usage is in memory."""
        return len(self._usage_by_key)

    def enter(self, principal: Principal | None) -> RateLimitPermit:
        """Admit one request: it counts as running until the returned permit ends.

        Raises:
            ApiError: 429 if a limit is exceeded, with the seconds after which the request would be admitted.
        """
        if principal is None or _unlimited(principal):
            return RateLimitPermit(self._clock)
        usage = self._usage(principal)
        if principal.concurrency is not None and usage.running >= principal.concurrency:
            raise _limit_error(f"this API key is limited to {principal.concurrency} requests at a time", 1.0)
        if wait := usage.requests.wait(principal.requests_per_minute, 1):
            raise _limit_error(f"this API key is limited to {principal.requests_per_minute} requests a minute", wait)
        usage.running += 1
        usage.requests.used += 1
        return RateLimitPermit(self._clock, principal, usage)

    def _usage(self, principal: Principal) -> _KeyUsage:
        now = self._clock()
        if now - self._pruned_at >= _MINUTE:
            self._prune(now)
        _, usage = self._usage_by_key.get(principal.key_id) or (principal, _KeyUsage(now))
        usage.drain(principal, now)
        self._usage_by_key[principal.key_id] = (principal, usage)
        return usage

    def _prune(self, now: float) -> None:
        self._pruned_at = now
        for key_id, (principal, usage) in list(self._usage_by_key.items()):
            usage.drain(principal, now)
            if not (usage.running or usage.requests.used or usage.tokens.used):
                del self._usage_by_key[key_id]


def _unlimited(principal: Principal) -> bool:
    return principal.requests_per_minute is principal.tokens_per_minute is principal.concurrency is None


def _limit_error(limit: str, wait: float) -> ApiError:
    retry_after = max(1, math.ceil(wait))
    return overloaded(
        f"{limit}; try again in {retry_after} s, or have an admin raise this limit",
        retry_after,
        status=429,
    )


def _headers(principal: Principal, usage: _KeyUsage) -> Headers:
    headers: Headers = []
    for name, limit, bucket in (
        (b"requests", principal.requests_per_minute, usage.requests),
        (b"tokens", principal.tokens_per_minute, usage.tokens),
    ):
        if limit is not None:
            headers.append((b"x-ratelimit-limit-" + name, b"%d" % limit))
            headers.append((b"x-ratelimit-remaining-" + name, b"%d" % bucket.remaining(limit)))
    return headers
