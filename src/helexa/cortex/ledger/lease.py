"""Leases: a gateway takes tokens of an API key's budget from the database in advance, and spends them from memory.

With leases, most reservations need no database access.
"""

import math
from dataclasses import dataclass

from helexa.core.errors import ApiError
from helexa.cortex.access.principal import Principal, Window

_PREFETCHED_RESERVATIONS = 256  # a lease takes tokens in advance for at most this many more reservations
_PREFETCH_DIVISOR = 8  # and at most 1/8 of the remaining tokens, so that leases shrink near the cap
IDLE_SECS = 1.0  # after this idle time a lease returns its free tokens
UNUSED_SECS = 60.0  # after this idle time a lease is deleted


@dataclass(slots=True, eq=False)
class Lease:
    """Tokens that one gateway has taken in advance from the current budget window of one key.

    A key without a cap also has a lease, which counts tokens without limiting them.

    Attributes:
        key_id: the key.
        window_id: the Unix second in which the window began; 0 for a balance, which is a window without an end.
        window: the kind of window: a balance, or a rolling window of a given length.
        ends_at: when the window ends (Unix seconds); infinity for a balance.
        cap: the key's token cap when tokens were last taken; None for a key without a cap.
        granted: tokens taken from the window so far, including `spent` and `reserved`.
        spent: tokens charged so far.
        reserved: tokens of open reservations.
        debt: tokens granted above the cap, because a response was longer than its reservation or the cap was lowered.
            Tokens that become free reduce the debt first.
        used_at: when tokens were last reserved, settled or released (Unix seconds).
    """

    key_id: str
    window_id: int
    window: Window
    ends_at: float
    cap: int | None
    granted: int = 0
    spent: int = 0
    reserved: int = 0
    debt: int = 0
    used_at: float = 0.0

    def has(self, principal: Principal, tokens: int, now: float) -> bool:
        """Return whether the lease is valid and has at least `tokens` free tokens.

        The lease is no longer valid if its window has ended, or if the key's cap or window was changed.
        """
        return (
            now < self.ends_at
            and (self.cap is None or self.granted - self.spent - self.reserved >= tokens)
            and self.cap == principal.hard_cap
            and self.window == principal.window
        )

    @property
    def free(self) -> int:
        """Number of granted tokens that are neither spent nor reserved; 0 for a key without a cap."""
        return max(0, self.granted - self.spent - self.reserved)

    def settle(self, reserved: int, charged: int) -> None:
        """End a reservation: subtract `reserved` from the lease's reserved tokens and add `charged` to `spent`.

        If `spent` + `reserved` is then greater than `granted`, the difference is added to `granted` and to `debt`.
        """
        self.reserved -= reserved
        self.spent += charged
        if self.cap is not None:
            shortfall = self.spent + self.reserved - self.granted
            adjustment = shortfall if shortfall > 0 else -min(self.debt, -shortfall)
            self.granted += adjustment
            self.debt += adjustment


def window_at(window: Window, latest: int, now: float) -> int:
    """Return the id of the budget window to which a reservation at the time `now` belongs.

    A balance has the id 0. A rolling window begins with the first reservation after the previous window has ended. The
    id of a rolling window is the Unix second in which the window began.

    Args:
        window: the kind of window.
        latest: id of the key's newest window, or 0 if the key has none.
        now: Unix seconds.
    """
    if window.kind == "balance":
        return 0
    return latest if latest and now < latest + window.seconds else int(now)


def grant(available: int, requested: list[int]) -> int:
    """Return the number of tokens that a lease takes from its budget window; 0 if no waiting reservation fits.

    The number is the tokens of all waiting reservations that fit, plus an advance for later reservations.

    Args:
        available: number of tokens that the lease may take.
        requested: tokens of each waiting reservation, in order. A reservation that does not fit is skipped.
    """
    fitting_tokens = largest_request = 0
    for tokens in requested:
        if fitting_tokens + tokens <= available:
            fitting_tokens += tokens
            largest_request = max(largest_request, tokens)
    if not fitting_tokens:
        return 0
    prefetch = min(largest_request * _PREFETCHED_RESERVATIONS, (available - fitting_tokens) // _PREFETCH_DIVISOR)
    return fitting_tokens + prefetch


def over_budget(principal: Principal, tokens: int, available: int, ends_at: float, now: float) -> ApiError:
    """Return the 429 error response for a reservation that does not fit into the key's budget.

    The error's extra field `tokens_left` is `available`, but at least 0.

    Args:
        principal: account and key of the request.
        tokens: number of tokens that the request wanted to reserve.
        available: number of tokens that are left in the budget; may be negative.
        ends_at: when the budget window ends (Unix seconds); determines `Retry-After` for a rolling window.
        now: Unix seconds.
    """
    tokens_left = max(0, available)
    explanation = f"{tokens_left} of the key's {principal.hard_cap} tokens are left, this request may use {tokens}"
    if principal.window.kind == "balance":
        return ApiError(429, "insufficient_quota", explanation, type="insufficient_quota", tokens_left=tokens_left)
    seconds = max(1, math.ceil(ends_at - now))
    return ApiError(
        429,
        "rate_limit_exceeded",
        f"{explanation}; retry in {seconds} s",
        type="rate_limit_error",
        retry_after=seconds,
        tokens_left=tokens_left,
    )
