"""Queues of reservations, settlements and `flush` calls that wait for the ledger's next write to the database."""

import asyncio
from collections import deque
from collections.abc import Iterable

from helexa.core.errors import ApiError, service_unavailable
from helexa.cortex.ledger.reservation import Closing, PendingReservation


class CommitQueue:
    """Queues of reservations, settlements and `flush` calls that wait for the ledger's next batch.

    A batch is one transaction that writes the gathered changes to the database.

    Attributes:
        reservations: requested reservations to grant or reject, in order of arrival.
        closings: settlements and releases that are not yet applied to the budgets.
        closed: settlements and releases that are applied to the budgets. Their callers are woken once the database has
            the batch that contains them.
        flushes: one future per `flush` call, resolved once a batch is in the database or when the database fails.
    """

    def __init__(self) -> None:
        self.reservations: deque[PendingReservation] = deque()
        self.closings: list[Closing] = []
        self.closed: list[Closing] = []
        self.flushes: list[asyncio.Future[None]] = []

    def __bool__(self) -> bool:
        return bool(self.reservations or self.closings or self.closed or self.flushes)

    def next_flush(self) -> asyncio.Future[None]:
        """Queue and return a future that is resolved after the next batch, or when the database fails."""
        flush: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.flushes.append(flush)
        return flush

    def resolve(self, flushes: Iterable[asyncio.Future[None]] | None = None) -> None:
        """Resolve the futures in `flushes`, or all queued flush futures if `flushes` is None."""
        for flush in self.flushes if flushes is None else flushes:
            if not flush.done():
                flush.set_result(None)
        self.flushes = [flush for flush in self.flushes if not flush.done()]

    def reject(self) -> None:
        """Reject and remove all waiting reservations because the database does not answer."""
        reject(self.reservations)
        self.reservations.clear()

    def finish(self) -> None:
        """Wake the callers of all queued settlements and releases, which stay queued and are written later."""
        finish([*self.closings, *self.closed])


def unavailable() -> ApiError:
    """Return the error response for a reservation that is rejected because the database does not answer."""
    return service_unavailable("the ledger does not answer", retry_after=5)


def reject(reservations: Iterable[PendingReservation]) -> None:
    """Reject reservations because the database does not answer."""
    for request in reservations:
        request.reject(unavailable())


def finish(closings: Iterable[Closing]) -> None:
    """Wake all callers that wait for the settlements and releases in `closings`."""
    for closing in closings:
        closing.finish()
