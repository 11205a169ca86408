"""Leases and reservations of tokens.

A lease holds tokens of a key's budget that one gateway has taken from the database in advance. A reservation sets aside
tokens of a lease for one running request.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

import msgspec

from helexa.core.errors import ApiError
from helexa.cortex.access.keys import Principal, Window
from helexa.cortex.ledger.storage.database import plain

_PREFETCHED_RESERVATIONS = 256  # a lease takes tokens in advance for at most this many more reservations
_PREFETCH_DIVISOR = (
    8  # a lease takes at most 1/8 of the remaining tokens in advance, so that leases shrink near the cap
)
IDLE_SECS = 1.0  # after this idle time a lease returns its free tokens
UNUSED_SECS = 60.0  # after this idle time a lease is deleted
CLOCK_SKEW_SECS = 60  # a window may begin this long in the future, because the clocks of several gateways may differ

MAX_TOKENS = 1 << 31  # limit for numbers from nodes and clients; database columns have 64 bits


@dataclass(slots=True, eq=False)
class Lease:
    """Tokens that one gateway has taken in advance from a key's budget window.

    A key without a cap also has a lease, which counts tokens without limiting them.
    """

    key_id: str
    window_id: int  # the Unix second in which the window began; 0 for a balance, which is a window without an end
    window: Window  # the kind of window: a balance, or a rolling window of a given length
    ends_at: float  # when the window ends (Unix seconds); infinity for a balance
    cap: int | None  # the key's token cap when tokens were last taken; None for a key without a cap
    granted: int = 0  # tokens taken from the window so far, including `spent` and `reserved`
    spent: int = 0
    reserved: int = 0
    # Tokens granted above the cap, because a response was longer than its reservation or the cap was lowered. Tokens
    # that become free reduce the debt first.
    debt: int = 0
    used_at: float = 0.0  # when tokens were last reserved, settled or released (Unix seconds)

    def has(self, principal: Principal, tokens: int, now: float) -> bool:
        """Return whether the lease is valid and has at least `tokens` free tokens.

        The lease is not valid if its window has ended or has not begun, or if the key's cap or window was changed.
        """
        return (
            self.window_id <= latest_begin(now)
            and now < self.ends_at
            and (self.cap is None or self.granted - self.spent - self.reserved >= tokens)
            # a changed cap or window must be read from the database again
            and self.cap == principal.hard_cap
            and self.window == principal.window
        )

    @property
    def free(self) -> int:
        """Granted tokens that are neither spent nor reserved; 0 without a cap."""
        return max(0, self.granted - self.spent - self.reserved)

    def settle(self, reserved: int, charged: int) -> None:
        """Free an ended reservation's `reserved` tokens, and count `charged` as spent."""
        self.reserved -= reserved
        self.spent += charged
        if self.cap is not None:
            # If a response was longer than its reservation, the missing tokens are granted as debt. Tokens that become
            # free later reduce the debt first.
            shortfall = self.spent + self.reserved - self.granted
            adjustment = shortfall if shortfall > 0 else -min(self.debt, -shortfall)
            self.granted += adjustment
            self.debt += adjustment


def latest_begin(now: float) -> int:
    """Return the largest id of a rolling window that counts as begun at `now`."""
    # A window's id is the Unix second in which the window began. A larger id comes from a gateway whose clock is wrong.
    # Its window is ignored, because it would end too late.
    return int(now) + CLOCK_SKEW_SECS


def window_at(window: Window, latest: int, now: float) -> int:
    """Return the id of the budget window for a reservation at the time `now`.

    A rolling window begins with the first reservation after the previous window has ended.

    Args:
        latest: id of the key's newest window that has begun (see `latest_begin`), or 0 if the key has none.
    """
    if window.kind == "balance":
        return 0
    return latest if latest and now < latest + window.seconds else int(now)


def grant(available: int, requested: list[int]) -> int:
    """Return the number of tokens that a lease takes from its budget window.

    The number is the tokens of all waiting reservations that fit, plus an advance for later reservations. It is 0 if
    no reservation fits.

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
    """Return the 429 error for a reservation that exceeds the key's budget.

    Args:
        available: number of tokens that are left in the budget; may be negative.
        ends_at: when the budget window ends (Unix seconds); determines `Retry-After` for a rolling window.
    """
    tokens_left = max(0, available)
    explanation = f"{tokens_left} of the key's {principal.hard_cap} tokens are left, this request may use {tokens}"
    if principal.window.kind == "balance":
        advice = "lower max_tokens, or have the key's cap raised"
        return ApiError(
            429, "insufficient_quota", f"{explanation}; {advice}", type="insufficient_quota", tokens_left=tokens_left
        )
    seconds = max(1, math.ceil(ends_at - now))
    return ApiError(
        429,
        "rate_limit_exceeded",
        f"{explanation}; retry in {seconds} s",
        type="rate_limit_error",
        retry_after=seconds,
        tokens_left=tokens_left,
    )


class ReservationRequest(msgspec.Struct, eq=False):
    """The tokens that a request wants to reserve, with its principal and model."""

    principal: Principal
    request_id: str
    model: str
    tokens: int


class PendingReservation(msgspec.Struct, eq=False):
    """A requested reservation and the future of its caller."""

    request: ReservationRequest
    future: "asyncio.Future[Reservation]"

    @property
    def waiting(self) -> bool:
        """True if the future has no result yet and the caller was not cancelled."""
        return not self.future.done()

    def grant(self, reservation: "Reservation") -> None:
        """Resolve the future, or abandon `reservation` if the caller no longer waits."""
        if self.waiting:
            self.future.set_result(reservation)
        else:  # the caller was cancelled
            reservation.abandon()

    def reject(self, error: ApiError) -> None:
        """Set `error` as the future's exception. If the future is done, do nothing."""
        if self.waiting:
            self.future.set_exception(error)


class Closing(msgspec.Struct, eq=False):
    """The end of a reservation: `settled` charges tokens, `released` charges none."""

    reservation: "Reservation"
    state: Literal["settled", "released"]
    prompt: int  # number of prompt tokens, including `cached`
    completion: int
    cached: int  # number of prompt tokens that the node read from its prefix cache
    node: str | None
    estimated: bool  # True if the gateway estimated the token counts
    applied: bool = False  # True once the gateway has changed the lease in memory
    # True once the callers need not wait any longer, because the change is durable or the database is unavailable
    done: bool = False
    _waiting: "list[asyncio.Future[None]]" = msgspec.field(default_factory=list)

    def finish(self) -> None:
        """Set `done` and wake the callers that wait in `finished`."""
        self.done = True
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def finished(self) -> None:
        """Wait until `finish` is called."""
        if not self.done:  # each caller gets a future of its own, because each can be cancelled separately
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    @property
    def charged(self) -> int:
        """Number of tokens to charge; 0 for a released reservation."""
        return self.prompt + self.completion

    def values(self, now: float) -> tuple[object, ...]:
        """Return the values of the columns `node` to `closed_ms` of the table `entries`."""
        return (
            self.node,
            self.prompt + self.completion,
            self.prompt,
            self.completion,
            self.cached,
            int(self.estimated),
            int(now * 1000),
        )


class Reservation:
    """Tokens of a key's budget that are reserved for one request.

    The reservation ends with the first call of `settle`, `release` or `abandon`, or at the end of an `async with`
    block. Later calls change nothing; `settle` and `release` then wait for the first end. A settlement or release that
    has begun completes even if the caller is canceled.

    Attributes:
        gateway: id of the gateway that made the reservation.
        lease: the lease that the tokens come from.
    """

    __slots__ = ("_close", "_closing", "gateway", "lease", "request_id", "seq", "tokens")

    def __init__(
        self, gateway: int, seq: int, request: ReservationRequest, lease: Lease, close: Callable[[Closing], None]
    ) -> None:
        self.gateway, self.seq, self.lease = gateway, seq, lease
        self.request_id, self.tokens = request.request_id, request.tokens
        self._close = close
        self._closing: Closing | None = None

    async def settle(
        self, prompt: int, completion: int, *, cached: int = 0, node: str | None = None, estimated: bool = False
    ) -> None:
        """End the reservation and charge all used tokens, even more than were reserved.

        The call waits until the settlement survives a crash. If the database is unavailable for several seconds, the
        call returns earlier, and the settlement is written later.

        Args:
            prompt: prompt tokens, including `cached`.
            cached: prompt tokens that the node read from its prefix cache.
            estimated: True if the gateway estimated the token counts.
        """
        closing = self._begin("settled", bounded(prompt), bounded(completion), bounded(cached), node, estimated)
        await closing.finished()

    async def release(self) -> None:
        """End the reservation without a charge, and wait as `settle` does."""
        await self._begin("released").finished()

    def abandon(self) -> None:
        """End the reservation without a charge, and write the release later."""
        self._begin("released")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    def _begin(
        self,
        state: Literal["settled", "released"],
        prompt: int = 0,
        completion: int = 0,
        cached: int = 0,
        node: str | None = None,
        estimated: bool = False,
    ) -> Closing:
        # Only the first call ends the reservation. Later calls wait for its end.
        if self._closing is None:
            node = node and plain(node)
            self._closing = Closing(self, state, prompt, completion, cached, node, estimated)
            self._close(self._closing)
        return self._closing


def bounded(number: int, maximum: int = MAX_TOKENS) -> int:
    """Return the untrusted `number`, limited to the range from 0 to `maximum`."""
    return min(max(0, number), maximum)
