"""What waits for the next batch of the ledger, and the requests that wait for it."""

import asyncio
from collections import deque
from collections.abc import Iterable

from helexa.core.errors import ApiError, service_unavailable
from helexa.cortex.ledger.reservation import Asked, Closing


class Waiting:
    """What waits for the next batch.

    Attributes:
        asked: reservations to decide, in their order.
        closings: settlements and releases to decide.
        closed: decided settlements and releases, which are finished once a batch has them.
        flushes: resolved once a batch was written, or when the database fails.
    """

    def __init__(self) -> None:
        self.asked: deque[Asked] = deque()
        self.closings: list[Closing] = []
        self.closed: list[Closing] = []
        self.flushes: list[asyncio.Future[None]] = []

    def __bool__(self) -> bool:
        return bool(self.asked or self.closings or self.closed or self.flushes)

    def next_flush(self) -> asyncio.Future[None]:
        """Return a future that is resolved after the next batch, or when the database fails."""
        flush: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.flushes.append(flush)
        return flush

    def resolve(self, flushes: Iterable[asyncio.Future[None]] | None = None) -> None:
        """Resolve these flushes, or all."""
        for flush in self.flushes if flushes is None else flushes:
            if not flush.done():
                flush.set_result(None)
        self.flushes = [flush for flush in self.flushes if not flush.done()]

    def refuse(self) -> None:
        """Refuse all reservations, because the database does not answer."""
        refuse(self.asked)
        self.asked.clear()

    def finish(self) -> None:
        """Let no settlement wait any longer; each stays in its list, to be written."""
        finish([*self.closings, *self.closed])


def unavailable() -> ApiError:
    """Return the error of a reservation while the database does not answer."""
    return service_unavailable("the ledger does not answer", retry_after=5)


def refuse(asked: Iterable[Asked]) -> None:
    """Refuse reservations, because the database does not answer."""
    for one in asked:
        one.refuse(unavailable())


def finish(closings: Iterable[Closing]) -> None:
    """Let nothing wait for these settlements any longer."""
    for closing in closings:
        closing.finish()
