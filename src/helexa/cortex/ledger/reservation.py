"""Reservations: tokens of a key's budget that are set aside for one running request."""

import asyncio
from collections.abc import Callable
from typing import Literal, Self

import msgspec

from helexa.core.errors import ApiError
from helexa.cortex.access.principal import Principal
from helexa.cortex.ledger.lease import Lease

MAX_TOKENS = 1 << 31  # limit for numbers from nodes and clients; database columns have 64 bits
_MAX_TEXT_CHARS = 200


class ReservationRequest(msgspec.Struct, eq=False):
    """The number of tokens that a request wants to reserve, and the request's principal, id and model."""

    principal: Principal
    request_id: str
    model: str
    tokens: int


class PendingReservation(msgspec.Struct, eq=False):
    """A requested reservation that waits for the database, and the future that gets the reservation or an error."""

    request: ReservationRequest
    future: "asyncio.Future[Reservation]"

    @property
    def waiting(self) -> bool:
        """True if the future has no result yet and the caller was not cancelled."""
        return not self.future.done()

    def grant(self, reservation: "Reservation") -> None:
        """Resolve the future with a reservation. If the caller was cancelled, release the reservation instead."""
        if self.waiting:
            self.future.set_result(reservation)
        else:
            reservation.abandon()

    def reject(self, error: ApiError) -> None:
        """Set `error` as the future's exception. If the caller was cancelled, do nothing."""
        if self.waiting:
            self.future.set_exception(error)


class Closing(msgspec.Struct, eq=False):
    """The end of a reservation, which is either settled (its tokens are charged) or released (nothing is charged).

    Attributes:
        reservation: the reservation that ends.
        state: `settled` or `released`.
        prompt: number of prompt tokens, including `cached`.
        completion: number of completion tokens.
        cached: number of prompt tokens that the node read from its prefix cache.
        node: node that produced the tokens.
        estimated: True if the gateway estimated the token counts.
        done: True once the callers need not wait any longer, because the change is durable or the database is
            unavailable.
    """

    reservation: "Reservation"
    state: Literal["settled", "released"]
    prompt: int
    completion: int
    cached: int
    node: str | None
    estimated: bool
    done: bool = False
    _waiting: "list[asyncio.Future[None]]" = msgspec.field(default_factory=list)

    def finish(self) -> None:
        """Set `done` and wake the callers that wait in `finished`."""
        self.done = True
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def finished(self) -> None:
        """Wait until `finish` is called. Several callers may wait; each can be cancelled separately."""
        if not self.done:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    @property
    def charged(self) -> int:
        """Number of tokens to charge; 0 for a released reservation."""
        return self.prompt + self.completion

    def values(self, now: float) -> tuple[object, ...]:
        """Return the values of the last columns of the reservation's row in the table `entries`.

        The columns are node, charged, prompt, completion, cached, estimated, closed_ms.
        """
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

    The reservation ends with the first call of `settle`, `release` or `abandon`. Later calls have no effect. The end of
    a `with` block releases the reservation if `settle` was not called. A settlement or release that has begun completes
    even if the caller is cancelled.

    Attributes:
        gateway: id of the gateway that made the reservation.
        seq: number of the reservation within the gateway.
        lease: the lease that the tokens come from. A lease holds tokens that the gateway has taken from the key's
            budget in advance.
        request_id: id of the request.
        tokens: number of reserved tokens.
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
        """End the reservation and charge the tokens that the request used, which may be fewer or more than reserved.

        The call waits until the settlement survives a crash. If the database is unavailable for several seconds, the
        call returns earlier, and the settlement is written later.

        Args:
            prompt: prompt tokens, including `cached`.
            completion: completion tokens.
            cached: prompt tokens that the node read from its prefix cache.
            node: node that produced the tokens.
            estimated: True if the gateway estimated the token counts.
        """
        closing = self._begin("settled", bounded(prompt), bounded(completion), bounded(cached), node, estimated)
        await closing.finished()

    async def release(self) -> None:
        """End the reservation without a charge, and wait until the release survives a crash."""
        await self._begin("released").finished()

    def abandon(self) -> None:
        """End the reservation without a charge and without waiting. The release is written later."""
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
        if self._closing is None:
            node = node and plain(node)
            self._closing = Closing(self, state, prompt, completion, cached, node, estimated)
            self._close(self._closing)
        return self._closing


def bounded(number: int, maximum: int = MAX_TOKENS) -> int:
    """Return `number`, which may come from an untrusted source, limited to the range from 0 to `maximum`."""
    return min(max(0, number), maximum)


def plain(text: str) -> str:
    """Return untrusted text in a form that SQLite and PostgreSQL can store: short, valid UTF-8, no NUL."""
    if len(text) <= _MAX_TEXT_CHARS and text.isascii() and "\0" not in text:
        return text
    return text[:_MAX_TEXT_CHARS].replace("\0", "").encode("utf-8", "replace").decode()
