"""What a gateway takes ahead from a key's window, so that most reservations are decided without asking the database."""

import math
from dataclasses import dataclass

from helexa.core.errors import ApiError
from helexa.cortex.access.principal import Principal, Window

_AHEAD = 256  # a lease holds at most so many reservations of the size at hand,
_SHARE = 8  # and at most this part of what is left, so that near the cap it is worth one reservation
IDLE_SECS = 1.0  # a lease unused so long gives its free tokens back
FORGOTTEN_SECS = 60.0  # and one unused so long is given up


@dataclass(slots=True, eq=False)
class Lease:
    """One gateway's part of one window of one key; a key without a cap has one too, to count in.

    Attributes:
        window_id: 0 for a balance, else the second in which the window began.
        ends_at: when the window ends (Unix seconds), infinity for a balance.
        cap: the key's cap when tokens were last taken.
        granted: tokens taken from the window so far; `spent` and `reserved` are parts of them.
        debt: tokens taken though they were not there: an answer was longer than what had been reserved for it, or the
            cap was lowered. What comes free pays it first.
        used_at: when it was last reserved from or settled (Unix seconds).
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
        """Whether a reservation fits without asking the database."""
        return (
            now < self.ends_at
            and (self.cap is None or self.granted - self.spent - self.reserved >= tokens)
            and self.cap == principal.hard_cap
            and self.window == principal.window
        )

    @property
    def free(self) -> int:
        """Tokens granted and not used; a key without a cap needs none."""
        return max(0, self.granted - self.spent - self.reserved)

    def settle(self, reserved: int, charged: int) -> None:
        """Charge tokens for a reservation that ends."""
        self.reserved -= reserved
        self.spent += charged
        if self.cap is not None:
            lacking = self.spent + self.reserved - self.granted
            change = lacking if lacking > 0 else -min(self.debt, -lacking)
            self.granted += change
            self.debt += change


def window_at(window: Window, latest: int, now: float) -> int:
    """The id of the window that a reservation made now belongs to.

    A rolling window begins with the first reservation after the one before has ended, and its id is the second in which
    it began. To begin one is to add a row: what was spent in another is never touched.

    Args:
        window: the kind of window.
        latest: id of the key's newest window, 0 if there was none.
        now: Unix seconds.
    """
    if window.kind == "balance":
        return 0
    return latest if latest and now < latest + window.seconds else int(now)


def grant(available: int, needs: list[int]) -> int:
    """How many tokens to take for the reservations that wait, in their order, and ahead of those to come.

    Args:
        available: tokens of the window that nobody has spent or taken.
        needs: tokens of each reservation; one that does not fit is passed over.
    """
    fitting = biggest = 0
    for need in needs:
        if fitting + need <= available:
            fitting += need
            biggest = max(biggest, need)
    return fitting + min(biggest * _AHEAD, (available - fitting) // _SHARE) if fitting else 0


def over_budget(principal: Principal, tokens: int, available: int, ends_at: float, now: float) -> ApiError:
    """Return the error of a reservation that does not fit; its `tokens_left` are what would fit."""
    rest = max(0, available)
    left = f"{rest} of the key's {principal.hard_cap} tokens are left, this request may use {tokens}"
    if principal.window.kind == "balance":
        return ApiError(429, "insufficient_quota", left, type="insufficient_quota", tokens_left=rest)
    seconds = max(1, math.ceil(ends_at - now))
    return ApiError(
        429,
        "rate_limit_exceeded",
        f"{left}; retry in {seconds} s",
        type="rate_limit_error",
        retry_after=seconds,
        tokens_left=rest,
    )
