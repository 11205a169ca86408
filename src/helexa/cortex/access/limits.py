"""Per-key limits at one gateway: requests per minute, tokens per minute, concurrent requests."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from helexa.core.errors import ApiError, overloaded
from helexa.cortex.access.principal import Principal
from helexa.http.connections.request_head import Headers

_MINUTE = 60.0
_ROUNDING = 1e-6


@dataclass
class _Bucket:
    """Leaky bucket of one limit per minute.

    The bucket drains at a constant rate, one whole limit per minute.
    """

    used: float = 0.0

    def drain(self, limit: int | None, seconds: float) -> None:
        self.used = 0.0 if limit is None else max(0.0, self.used - seconds * limit / _MINUTE)

    def wait(self, limit: int | None, amount: float) -> float:
        """Return the seconds until `amount` fits.

        An amount above the limit fits an empty bucket, and leaves a debt.
        """
        excess = 0.0 if limit is None else self.used + min(amount, limit) - limit
        return 0.0 if limit is None or excess < _ROUNDING else excess * _MINUTE / limit

    def left(self, limit: int) -> int:
        return max(0, math.floor(limit - self.used))


@dataclass
class _Meter:
    at: float
    running: int = 0
    requests: _Bucket = field(default_factory=_Bucket)
    tokens: _Bucket = field(default_factory=_Bucket)

    def drain(self, principal: Principal, now: float) -> None:
        elapsed_secs, self.at = max(0.0, now - self.at), now
        self.requests.drain(principal.requests_per_minute, elapsed_secs)
        self.tokens.drain(principal.tokens_per_minute, elapsed_secs)


class Pass:
    """A request that its key's limits admitted.

    The request counts as running until `answered` or the end of the context.
    """

    __slots__ = ("_actual", "_clock", "_held", "_meter", "_principal", "_running")

    def __init__(
        self, clock: Callable[[], float], principal: Principal | None = None, meter: _Meter | None = None
    ) -> None:
        self._clock, self._principal, self._meter = clock, principal, meter
        self._held = self._actual = 0
        self._running = meter is not None

    def hold_tokens(self, tokens: int) -> None:
        """Reserve `tokens`, the maximum that the request may use, from the tokens-per-minute limit; call this once.

        Raises:
            ApiError: 429 with the seconds after which the same request would be admitted.
        """
        principal, meter = self._principal, self._meter
        if principal is None or meter is None or principal.tokens_per_minute is None:
            return
        meter.drain(principal, self._clock())
        if wait := meter.tokens.wait(principal.tokens_per_minute, tokens):
            wait = max(wait, meter.requests.wait(principal.requests_per_minute, 1))
            raise _refused(f"{principal.tokens_per_minute} tokens a minute, and this request may take {tokens}", wait)
        self._held = tokens
        meter.tokens.used += tokens

    @property
    def headers(self) -> Headers:
        """The current `x-ratelimit-*` response headers."""
        principal, meter = self._principal, self._meter
        return [] if principal is None or meter is None else _headers(principal, meter)

    def spent(self, tokens: int) -> None:
        """Replace the reserved tokens by the `tokens` that the request used.

        Without this call, zero tokens are counted.
        """
        self._actual = tokens

    def answered(self) -> None:
        """Stop counting the request as running, so that its client may send the next request during settlement."""
        if self._running and self._meter is not None:
            self._meter.running -= 1
        self._running = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.answered()
        meter = self._meter
        if meter is not None:
            meter.tokens.used = max(0.0, meter.tokens.used + self._actual - self._held)


class Limits:
    """Admits requests within the limits of their keys, in two steps.

    1. `enter`, before the body is read: concurrent requests and requests per minute. A request that enters counts
       against both, even if it is rejected later.
    2. `Pass.hold_tokens`, once the body is known: tokens per minute.

    A limit of N per minute is a bucket that drains N per minute: N requests may arrive at once, and then N in every
    minute. Only keys with a limit and recent requests have state here.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meters: dict[str, tuple[Principal, _Meter]] = {}
        self._swept_at = clock()

    def __len__(self) -> int:
        """Number of keys with state."""
        return len(self._meters)

    def enter(self, principal: Principal | None) -> Pass:
        """Admit one request, which runs until the context of the returned pass ends.

        Raises:
            ApiError: 429 with the seconds after which the request would be admitted.
        """
        if principal is None or _unlimited(principal):
            return Pass(self._clock)
        meter = self._meter(principal)
        if principal.concurrency is not None and meter.running >= principal.concurrency:
            raise _refused(f"{principal.concurrency} requests at a time", 1.0)
        if wait := meter.requests.wait(principal.requests_per_minute, 1):
            raise _refused(f"{principal.requests_per_minute} requests a minute", wait)
        meter.running += 1
        meter.requests.used += 1
        return Pass(self._clock, principal, meter)

    def _meter(self, principal: Principal) -> _Meter:
        now = self._clock()
        if now - self._swept_at >= _MINUTE:
            self._sweep(now)
        _, meter = self._meters.get(principal.key_id) or (principal, _Meter(now))
        meter.drain(principal, now)
        self._meters[principal.key_id] = (principal, meter)
        return meter

    def _sweep(self, now: float) -> None:
        self._swept_at = now
        for key_id, (principal, meter) in list(self._meters.items()):
            meter.drain(principal, now)
            if not (meter.running or meter.requests.used or meter.tokens.used):
                del self._meters[key_id]


def _unlimited(principal: Principal) -> bool:
    return principal.requests_per_minute is principal.tokens_per_minute is principal.concurrency is None


def _refused(limit: str, wait: float) -> ApiError:
    retry_after = max(1, math.ceil(wait))
    return overloaded(f"this API key is limited to {limit}; try again in {retry_after} s", retry_after, status=429)


def _headers(principal: Principal, meter: _Meter) -> Headers:
    headers: Headers = []
    for name, limit, bucket in (
        (b"requests", principal.requests_per_minute, meter.requests),
        (b"tokens", principal.tokens_per_minute, meter.tokens),
    ):
        if limit is not None:
            headers.append((b"x-ratelimit-limit-" + name, b"%d" % limit))
            headers.append((b"x-ratelimit-remaining-" + name, b"%d" % bucket.left(limit)))
    return headers
