"""One request's claim on its key's budget."""

import asyncio
from collections.abc import Callable
from typing import Literal, Self

import msgspec

from helexa.core.errors import ApiError
from helexa.cortex.access.principal import Principal
from helexa.cortex.ledger.lease import Lease

MOST_TOKENS = 1 << 31  # nodes and clients say numbers; a column holds 64 bits
_LONGEST_TEXT = 200


class Claim(msgspec.Struct, eq=False):
    """What a reservation is to hold, and for whom."""

    principal: Principal
    request_id: str
    model: str
    tokens: int


class Asked(msgspec.Struct, eq=False):
    """A reservation that somebody waits for."""

    claim: Claim
    answer: "asyncio.Future[Reservation]"

    @property
    def waiting(self) -> bool:
        """Whether the answer is still awaited."""
        return not self.answer.done()

    def grant(self, reservation: "Reservation") -> None:
        """Answer with a reservation, which is released if the answer is no longer awaited."""
        if self.waiting:
            self.answer.set_result(reservation)
        else:
            reservation.abandon()

    def refuse(self, error: ApiError) -> None:
        """Answer with an error, if the answer is still awaited."""
        if self.waiting:
            self.answer.set_exception(error)


class Closing(msgspec.Struct, eq=False):
    """How a reservation ends."""

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
        """It is durable, or will be: those who wait for it may go on."""
        self.done = True
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def finished(self) -> None:
        """Wait for it. Who gives up waiting changes nothing for others."""
        if not self.done:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    @property
    def charged(self) -> int:
        """Tokens to be paid."""
        return self.prompt + self.completion

    def values(self, now: float) -> tuple[object, ...]:
        """Columns of the entry: node, charged, prompt, completion, cached, estimated, closed_ms."""
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
    """Tokens held for a request until it is settled or released, whichever comes first; to ask again changes nothing.

    As a context manager it is released at the end unless it was settled. Neither needs the caller to live on: once
    asked for, both happen even if the caller is cancelled.

    Attributes:
        request_id: the request it belongs to.
        tokens: how many are held.
    """

    __slots__ = ("_close", "_closing", "gateway", "lease", "request_id", "seq", "tokens")

    def __init__(self, gateway: int, seq: int, claim: Claim, lease: Lease, close: Callable[[Closing], None]) -> None:
        self.gateway, self.seq, self.lease = gateway, seq, lease
        self.request_id, self.tokens = claim.request_id, claim.tokens
        self._close = close
        self._closing: Closing | None = None

    async def settle(
        self, prompt: int, completion: int, *, cached: int = 0, node: str | None = None, estimated: bool = False
    ) -> None:
        """Charge what was used, be it more or less than was held; durable on return.

        Only when the database has been away for seconds it returns before; the settlement then follows by itself.

        Args:
            prompt: prompt tokens, `cached` of them from a cache.
            completion: completion tokens.
            node: who produced them.
            estimated: they were not counted by the node.
        """
        closing = self._begin("settled", bounded(prompt), bounded(completion), bounded(cached), node, estimated)
        await closing.finished()

    async def release(self) -> None:
        """Charge nothing; durable on return."""
        await self._begin("released").finished()

    def abandon(self) -> None:
        """Release without waiting."""
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


def bounded(number: int, most: int = MOST_TOKENS) -> int:
    """A number that somebody else said, as a column can hold it."""
    return min(max(0, number), most)


def plain(text: str) -> str:
    """A text that somebody else said, as both databases can hold it."""
    if len(text) <= _LONGEST_TEXT and text.isascii() and "\0" not in text:
        return text
    return text[:_LONGEST_TEXT].replace("\0", "").encode("utf-8", "replace").decode()
