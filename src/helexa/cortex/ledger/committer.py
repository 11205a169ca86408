"""Group commit: everything that is requested while the database writes one batch goes into the next batch.

A request therefore costs microseconds when many requests arrive at once, and one commit when it arrives alone. Batches
are numbered. If the connection is lost during a commit, the gateway repeats the batch until the database has its
number, so each batch is written exactly once.

With a write-ahead log, a request waits for the database only while its key has to take tokens from its window. A
reservation that the key's lease covers is a line in the write-ahead log, and is gathered for the next batch.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from helexa.cortex.ledger import gateways
from helexa.cortex.ledger.activity import Activity, ActivityLog
from helexa.cortex.ledger.budgets import Budgets
from helexa.cortex.ledger.entries import Record
from helexa.cortex.ledger.lease import over_budget
from helexa.cortex.ledger.reservation import Asked, Claim, Closing, Reservation
from helexa.cortex.ledger.storage.database import Database, DatabaseError
from helexa.cortex.ledger.storage.retry import FIRST_RETRY_SECS, Retry
from helexa.cortex.ledger.waiting import Waiting, finish, refuse
from helexa.cortex.ledger.write_ahead_log import WriteAheadLog, catch_up

log = logging.getLogger(__name__)
T = TypeVar("T")
Opened = tuple[Asked, Reservation, Record]

_MOST_IN_BATCH = 512
_PATIENCE_SECS = 5.0  # a settlement waits at most this long for an unavailable database
_MANY_ROWS = 256  # of the activity log; fewer rows wait for the next periodic batch
_MANY_UNWRITTEN = 1000  # of the ledger; with a write-ahead log, fewer rows wait for the next periodic batch
_MOST_UNWRITTEN = 10_000  # of the ledger; with more rows, each request waits for the database


class Committer:
    """Owns a gateway's budgets: decides reservations, writes batches, and resolves the waiting requests.

    Attributes:
        budgets: leases and open reservations; replaced if other gateways declared this gateway dead.
        waiting: requests that wait for the next batch.
        activity: rows of the activity log to write.
        retry: repeats failing work and records why the database cannot be written.
        ending: True once no new reservations are accepted.
        clean: True if `run` ended with all requested changes in the database.
    """

    def __init__(self, database: Database, clock: Callable[[], float], name: str, alone: Path | None = None) -> None:
        """Set up without writing anything; `join` must follow.

        Args:
            database: the ledger's database.
            clock: returns Unix seconds.
            name: human-readable name of this gateway.
            alone: file of the database if only this gateway uses it; a write-ahead log is then kept next to the file.
        """
        self.waiting = Waiting()
        self.activity = ActivityLog()
        self.retry = Retry()
        self.ending = self.clean = False
        self._database, self._clock, self._name, self._alone = database, clock, name, alone
        self._journal: WriteAheadLog | None = None
        self._taking: set[str] = set()  # keys whose tokens are being taken from the database
        self._wake = asyncio.Event()
        self._tidying = self._beating = self._ended = False

    async def join(self) -> None:
        """Register as a gateway in the database, with new budgets.

        Raises:
            DatabaseError: the database does not answer, or the write-ahead log cannot be opened.
        """
        self.budgets = Budgets(await gateways.join(self._database, self._name))
        if self._alone is not None:
            try:
                self._journal = WriteAheadLog(self._alone)
            except OSError as error:
                raise DatabaseError(f"cannot keep a journal beside {self._alone}: {error.strerror}") from error
            self._journal.turn(self.budgets.gateway, self.budgets.batch + 1)

    def admit(self, claim: Claim) -> Reservation | None:
        """Decide a reservation at once with the write-ahead log; return None if the decision needs the database."""
        if self._journal is None or not self._journal.whole:
            return None
        if self.waiting.asked or self.budgets.unwritten >= _MOST_UNWRITTEN:
            return None
        admission = None
        if claim.principal.key_id not in self._taking:
            admission = self.budgets.admit(claim, self._clock(), self.close)
        if admission is None:
            return None
        reservation, record = admission
        if not self._journal.add(record):
            reservation.abandon()
            return None
        self._wake_for_many()
        return reservation

    def ask(self, asked: Asked) -> None:
        """Decide a reservation with the next batch."""
        self.waiting.asked.append(asked)
        self._wake.set()

    def record(self, activity: Activity) -> None:
        """Queue a row of the activity log.

        The row is written with the next periodic batch, or once many rows are queued.
        """
        self.activity.append(activity)
        if len(self.activity) >= _MANY_ROWS:
            self._wake.set()

    def close(self, closing: Closing) -> None:
        """Settle or release a reservation: at once with a write-ahead log, else with the next batch."""
        reservation = closing.reservation
        if self._ended:
            closing.finish()
        elif (
            self._journal is None
            or reservation.gateway != self.budgets.gateway
            or reservation.lease.key_id in self._taking
        ):
            self.waiting.closings.append(closing)
            self._wake.set()
        elif self._journal.add(self.budgets.close(closing, self._clock())):
            closing.finish()
            self._wake_for_many()
        else:
            self.waiting.closed.append(closing)
            self._wake.set()

    async def flush(self) -> None:
        """Wait until the rows of the ledger and the activity log are in the database, or until the database fails."""
        if self._journal is not None and not self._ended:
            flushed = self.waiting.next_flush()
            self.wake(tidy=True)
            await flushed

    async def probe(self) -> str | None:
        """Return why the database cannot be written, or None if a batch was written within the last second or now."""
        if self.retry.problem is None and not self.retry.fresh and not self._ended:
            flushed = self.waiting.next_flush()
            self.wake(beat=True)
            await flushed
        return self.retry.problem

    def wake(self, *, tidy: bool = False, beat: bool = False, end: bool = False) -> None:
        """Make a batch soon.

        Args:
            tidy: return the unused tokens of idle leases.
            beat: write a batch even if it is empty, to show that this gateway is alive.
            end: return from `run` once no work waits.
        """
        self._tidying |= tidy
        self._beating |= beat
        self.ending |= end
        self._wake.set()

    async def run(self) -> None:
        """Write batches until `wake(end=True)`; after an unexpected exception, register anew and continue."""
        try:
            while not (self.ending and self._idle()):
                if self._idle():
                    self._wake.clear()
                    await self._wake.wait()
                try:
                    await self._commit()
                except Exception:
                    log.exception("unexpected error in a batch of the ledger")
                    self.waiting.resolve()
                    await asyncio.sleep(FIRST_RETRY_SECS)
                    await self._insist(self._start_over)
            self.clean = True
        finally:
            self.ending = self._ended = True
            self.waiting.finish()
            self.waiting.refuse()
            self.waiting.resolve()
            if self._journal is not None:
                self._journal.close()
                self._journal = None

    def _idle(self) -> bool:
        must_write = self.budgets.unwritten >= _MANY_UNWRITTEN or (self.ending and not self.budgets.written)
        return not (self.waiting or must_write or self._logging() or self._tidying or self._beating)

    def _wake_for_many(self) -> None:
        if self.budgets.unwritten >= _MANY_UNWRITTEN:
            self._wake.set()

    def _logging(self) -> bool:
        """Return whether rows of the activity log must be written now."""
        rows = len(self.activity)
        return rows >= _MANY_ROWS or (rows > 0 and (self._tidying or self.ending))

    async def _commit(self) -> None:
        now, budgets, waiting = self._clock(), self.budgets, self.waiting
        flushes = list(waiting.flushes)
        closed, closings = waiting.closed, waiting.closings
        waiting.closed, waiting.closings = [], []
        own_closings = [closing for closing in closed if closing.reservation.gateway == budgets.gateway]
        previous_closings = [closing for closing in closed if closing.reservation.gateway != budgets.gateway]
        opened: list[Opened] = []
        short: dict[str, list[Asked]] = {}
        try:
            for closing in closings:
                if closing.reservation.gateway != budgets.gateway:
                    previous_closings.append(closing)
                    continue
                record = budgets.close(closing, now)
                if self._journal is not None and self._journal.add(record):
                    closing.finish()
                else:
                    own_closings.append(closing)
            opened, short = self._admit(now)
            self._taking = set(short)  # from here on, these leases must count only durable reservations
            if short and self._journal is not None and not own_closings:  # all are durable: no batch first
                opened += await self._take(short, now)
                short, self._taking = {}, set()
            opened = [admission for admission in opened if not self._note(*admission)]
            await self._write(
                opened, own_closings, now, [request for requests in short.values() for request in requests]
            )
            if short:
                await self._write(await self._take(short, now), [], now)
        except Exception:
            refuse(request for request, _, _ in opened)
            refuse(request for requests in short.values() for request in requests)
            # `_amend` closes them after this gateway has registered anew. Rows that are already closed are not changed
            # by it.
            waiting.closed += [*closed, *closings]
            raise
        finally:
            self._taking = set()
        for closing in previous_closings:
            await self._amend(closing, previous_closings)
        waiting.resolve(flushes)

    def _admit(self, now: float) -> tuple[list[Opened], dict[str, list[Asked]]]:
        """Decide the waiting reservations.

        Returns:
            The reservations that leases cover, and by key the requests that need more tokens than the key's lease has.
        """
        opened: list[Opened] = []
        short: dict[str, list[Asked]] = {}
        deferred: list[Asked] = []
        for _ in range(min(len(self.waiting.asked), _MOST_IN_BATCH)):
            request = self.waiting.asked.popleft()
            if not request.waiting:
                continue
            principal = request.claim.principal
            admission = None if principal.key_id in short else self.budgets.admit(request.claim, now, self.close)
            if admission is not None:
                opened.append((request, *admission))
            elif (requests := short.setdefault(principal.key_id, [])) and requests[0].claim.principal != principal:
                deferred.append(request)  # the key was changed meanwhile: each transaction handles one cap per key
            else:
                requests.append(request)
        self.waiting.asked.extendleft(reversed(deferred))
        return opened, short

    def _note(self, asked: Asked, reservation: Reservation, record: Record) -> bool:
        """Write a reservation to the write-ahead log and grant it.

        Return False if the next batch must contain it.
        """
        if self._journal is None or not self._journal.add(record):
            return False
        asked.grant(reservation)
        return True

    async def _take(self, short: dict[str, list[Asked]], now: float) -> list[Opened]:
        """Extend leases that do not suffice; return the reservations that they cover then, and reject the others."""
        budgets = self.budgets
        waiting = {key: [request for request in requests if request.waiting] for key, requests in short.items()}
        short = {key: requests for key, requests in waiting.items() if requests}
        claims = [[request.claim for request in requests] for _, requests in sorted(short.items())]
        try:
            grants = await gateways.take_all(self._database, budgets.gateway, claims, budgets.leases, now)
        except Exception as error:  # the transaction was rolled back
            if isinstance(error, DatabaseError | gateways.Swept):
                log.warning("no budget could be read: %s", error or type(error).__name__)
                self._beating = True  # the next batch finds the cause
            else:
                log.exception("no budget could be taken")
            refuse(request for requests in short.values() for request in requests)
            return []
        opened: list[Opened] = []
        for grant in grants:
            budgets.adopt(grant, now)
            for request in short[grant.lease.key_id]:
                claim = request.claim
                admission = budgets.admit(claim, now, self.close)
                if admission is not None:
                    opened.append((request, *admission))
                else:
                    request.refuse(over_budget(claim.principal, claim.tokens, grant.available, grant.ends_at, now))
        return opened

    async def _write(
        self, opened: Sequence[Opened], closings: Sequence[Closing], now: float, next_up: Sequence[Asked] = ()
    ) -> None:
        """Write a batch and resolve its requests; if the database does not answer, reject `next_up`, too."""
        try:
            written = await self._write_batch([*(request for request, _, _ in opened), *next_up], closings, now)
        except Exception:  # a bug that breaks this batch must not stop later batches
            log.exception("a batch of the ledger failed")
            written = False
        if written:
            for request, reservation, _ in opened:
                request.grant(reservation)
        else:
            log.warning("this gateway begins anew; reservations that are still open will be closed one by one")
            refuse(request for request, _, _ in opened)
            await self._insist(self._start_over, closings=closings)
            for closing in closings:
                await self._amend(closing, closings)
        finish(closings)

    async def _write_batch(self, asked: Sequence[Asked], closings: Sequence[Closing], now: float) -> bool:
        """Write the next batch. Return False if other gateways declared this gateway dead."""
        budgets = self.budgets
        if self._tidying:
            budgets.tidy(now)
        activity = self.activity.steps() if self._logging() else []
        must_write = self._beating or activity or not budgets.written
        self._tidying = self._beating = False
        if not must_write:
            return True
        guard, steps = budgets.next_batch(activity)
        if self._journal is not None:
            self._journal.turn(budgets.gateway, budgets.batch + 1)

        async def write() -> bool:
            if await self._database.write(guard, steps):
                return True
            rows = await self._database.fetch("SELECT batch FROM gateways WHERE id = $1", budgets.gateway)
            return bool(rows) and rows[0]["batch"] == budgets.batch  # written before the connection was lost

        written = await self._insist(write, asked, closings, retried=DatabaseError)
        if written and self._journal is not None:
            self._journal.written()
        return written

    async def _insist(
        self,
        work: Callable[[], Awaitable[T]],
        asked: Sequence[Asked] = (),
        closings: Sequence[Closing] = (),
        retried: type[Exception] = Exception,
    ) -> T:
        """Retry `work` until it succeeds.

        Args:
            work: one attempt.
            asked: reservations to reject when an attempt fails.
            closings: settlements that stop waiting if the database is unavailable for long; they are written later.
            retried: the exceptions to retry after; others are raised.
        """

        def failed(away_secs: float) -> None:
            refuse(asked)
            self.waiting.refuse()
            self.waiting.resolve()
            if away_secs > _PATIENCE_SECS:
                finish(closings)
                self.waiting.finish()

        return await self.retry.until_done(work, failed, retried)

    async def _start_over(self) -> None:
        """Register as a new gateway and retire the old registration, if it still exists."""
        previous_gateway = self.budgets.gateway
        if self._journal is not None:
            self._journal.close()
            self._journal = None  # no write-ahead log until `join` has succeeded
        if self._alone is not None:
            await catch_up(self._alone, self._database)
        gateway_rows = [row for row in await gateways.present(self._database) if row[0] == previous_gateway]
        await gateways.sweep(self._database, gateway_rows, self._clock())
        await self.join()

    async def _amend(self, closing: Closing, waiting: Sequence[Closing]) -> None:
        """Close a reservation of this gateway's previous registration; `waiting` are closed with it or after it."""

        async def amend() -> None:
            async with self._database.transaction() as sql:
                await gateways.amend(sql, closing.reservation, closing.state, closing.values(self._clock()))

        try:
            await self._insist(amend, closings=waiting, retried=DatabaseError)
        except Exception:  # a bug: the reservation stays charged in full
            log.exception("a reservation could not be closed")
        finish([closing])
