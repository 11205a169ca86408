"""Group commit: while the database writes one batch, new reservations and settlements are gathered for the next batch.

Requests that arrive together share one commit; a request that arrives alone costs one commit. Batches are numbered. If
the connection is lost during a commit, the gateway repeats the batch until the database has stored the batch's number.
The database skips a batch whose number is already stored, so each batch is written exactly once.

A lease holds tokens of an API key's budget that the gateway has taken from the database in advance. If the lease has
enough tokens and there is a write-ahead log, the request only waits until its reservation is in the log. The next batch
writes the reservation to the database. In all other cases, the request waits for the database.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from helexa.cortex.ledger import gateways
from helexa.cortex.ledger.activity import Activity, ActivityLog
from helexa.cortex.ledger.budgets import Budgets
from helexa.cortex.ledger.commit_queue import CommitQueue, finish, reject
from helexa.cortex.ledger.entries import Record
from helexa.cortex.ledger.lease import over_budget
from helexa.cortex.ledger.reservation import Closing, PendingReservation, Reservation, ReservationRequest
from helexa.cortex.ledger.storage.database import Database, DatabaseError
from helexa.cortex.ledger.storage.retry import FIRST_RETRY_SECS, Retry
from helexa.cortex.ledger.write_ahead_log import WriteAheadLog, catch_up

log = logging.getLogger(__name__)
T = TypeVar("T")
Opened = tuple[PendingReservation, Reservation, Record]
ReservationsByKey = dict[str, list[PendingReservation]]

_MAX_BATCH_REQUESTS = 512
_SETTLE_TIMEOUT_SECS = 5.0  # a settlement waits at most this long for an unavailable database
_ACTIVITY_BATCH_ROWS = 256  # fewer rows of the activity log wait for the next periodic batch
_LEDGER_BATCH_ROWS = 1000  # with a write-ahead log, fewer rows of the ledger wait for the next periodic batch
_MAX_UNWRITTEN_ROWS = 10_000  # with more unwritten rows of the ledger, each request waits for the database


class Committer:
    """Owns a gateway's budgets: grants or rejects reservations, writes batches, and wakes the waiting requests.

    Attributes:
        budgets: leases and open reservations; replaced when this gateway registers again.
        queue: reservations, settlements and calls of `flush` that wait for the next batch.
        activity: rows of the activity log that are not written yet.
        retry: repeats failed database work and records why the database cannot be written.
        ending: True once no new reservations are accepted.
        clean: True if `run` ended with all requested changes in the database.
    """

    def __init__(self, database: Database, clock: Callable[[], float], name: str, wal_base: Path | None = None) -> None:
        """Store the arguments. The caller must call `join` before any other method.

        Args:
            database: the ledger's database.
            clock: returns Unix seconds.
            name: human-readable name of this gateway.
            wal_base: the database file, next to which the write-ahead log is stored; None if gateways share a database.
        """
        self.queue = CommitQueue()
        self.activity = ActivityLog()
        self.retry = Retry()
        self.ending = self.clean = False
        self._database, self._clock, self._name, self._wal_base = database, clock, name, wal_base
        self._wal: WriteAheadLog | None = None
        self._extending: set[str] = set()  # ids of keys whose leases are being extended
        self._wake = asyncio.Event()
        self._tidy_due = self._heartbeat_due = self._ended = False

    async def join(self) -> None:
        """Register this gateway in the database under a new id, with empty budgets.

        Raises:
            DatabaseError: the database does not answer, or the write-ahead log cannot be opened.
        """
        self.budgets = Budgets(await gateways.join(self._database, self._name))
        if self._wal_base is not None:
            try:
                self._wal = WriteAheadLog(self._wal_base)
            except OSError as error:
                raise DatabaseError(f"cannot open the write-ahead log: {error.strerror}: {error.filename}") from error
            self._wal.start_batch(self.budgets.gateway, self.budgets.batch + 1)

    def admit(self, request: ReservationRequest) -> Reservation | None:
        """Reserve tokens without waiting for the database. Return None if the caller must use `enqueue` instead."""
        if self._wal is None or not self._wal.complete:
            return None
        if self.queue.reservations or self.budgets.unwritten >= _MAX_UNWRITTEN_ROWS:
            return None
        admission = None
        if request.principal.key_id not in self._extending:
            admission = self.budgets.admit(request, self._clock(), self.close)
        if admission is None:
            return None
        reservation, record = admission
        if not self._wal.add(record):
            reservation.abandon()
            return None
        self._wake_if_many_unwritten()
        return reservation

    def enqueue(self, pending: PendingReservation) -> None:
        """Queue a reservation that the next batch grants or rejects."""
        self.queue.reservations.append(pending)
        self._wake.set()

    def record(self, activity: Activity) -> None:
        """Queue a row of the activity log.

        The row is written with the next periodic batch, or once many rows are queued.
        """
        self.activity.append(activity)
        if len(self.activity) >= _ACTIVITY_BATCH_ROWS:
            self._wake.set()

    def close(self, closing: Closing) -> None:
        """Settle or release a reservation: now if there is a write-ahead log, else in the next batch."""
        reservation = closing.reservation
        if self._ended:
            closing.finish()
        elif (
            self._wal is None
            or reservation.gateway != self.budgets.gateway
            or reservation.lease.key_id in self._extending
        ):
            self.queue.closings.append(closing)
            self._wake.set()
        elif self._wal.add(self.budgets.close(closing, self._clock())):
            closing.finish()
            self._wake_if_many_unwritten()
        else:
            self.queue.closed.append(closing)
            self._wake.set()

    async def flush(self) -> None:
        """Wait until all queued rows are written or the database fails. Do nothing without a write-ahead log."""
        if self._wal is not None and not self._ended:
            flushed = self.queue.next_flush()
            self.wake(tidy=True)
            await flushed

    async def probe(self) -> str | None:
        """Return why the database cannot be written, or None. Write a test batch if the last write is not recent."""
        if self.retry.problem is None and not self.retry.fresh and not self._ended:
            flushed = self.queue.next_flush()
            self.wake(beat=True)
            await flushed
        return self.retry.problem

    def wake(self, *, tidy: bool = False, beat: bool = False, end: bool = False) -> None:
        """Wake `run` to write a batch.

        Args:
            tidy: also write the activity log, and give unused tokens of idle leases back to the keys' budgets.
            beat: write a batch even if it is empty, as a heartbeat of this gateway.
            end: accept no new reservations, and let `run` return when all work is written.
        """
        self._tidy_due |= tidy
        self._heartbeat_due |= beat
        self.ending |= end
        self._wake.set()

    async def run(self) -> None:
        """Write batches until `wake(end=True)` is called. After an unexpected error, register again and continue."""
        try:
            while not (self.ending and self._idle()):
                if self._idle():
                    self._wake.clear()
                    await self._wake.wait()
                try:
                    await self._commit()
                except Exception:
                    log.exception("unexpected error in a batch of the ledger")
                    self.queue.resolve()
                    await asyncio.sleep(FIRST_RETRY_SECS)
                    await self._retry_until_done(self._rejoin)
            self.clean = True
        finally:
            self.ending = self._ended = True
            self.queue.finish()
            self.queue.reject()
            self.queue.resolve()
            if self._wal is not None:
                self._wal.close()
                self._wal = None

    def _idle(self) -> bool:
        must_write = self.budgets.unwritten >= _LEDGER_BATCH_ROWS or (self.ending and not self.budgets.written)
        return not (self.queue or must_write or self._must_write_activity() or self._tidy_due or self._heartbeat_due)

    def _wake_if_many_unwritten(self) -> None:
        if self.budgets.unwritten >= _LEDGER_BATCH_ROWS:
            self._wake.set()

    def _must_write_activity(self) -> bool:
        rows = len(self.activity)
        return rows >= _ACTIVITY_BATCH_ROWS or (rows > 0 and (self._tidy_due or self.ending))

    async def _commit(self) -> None:
        now, budgets, queue = self._clock(), self.budgets, self.queue
        flushes = list(queue.flushes)
        closed, closings = queue.closed, queue.closings
        queue.closed, queue.closings = [], []
        own_closings = [closing for closing in closed if closing.reservation.gateway == budgets.gateway]
        previous_closings = [closing for closing in closed if closing.reservation.gateway != budgets.gateway]
        opened: list[Opened] = []
        uncovered: ReservationsByKey = {}
        try:
            for closing in closings:
                if closing.reservation.gateway != budgets.gateway:
                    previous_closings.append(closing)
                    continue
                record = budgets.close(closing, now)
                if self._wal is not None and self._wal.add(record):
                    closing.finish()
                else:
                    own_closings.append(closing)
            opened, uncovered = self._admit(now)
            self._extending = set(uncovered)  # these leases must now contain only durable reservations
            if uncovered and self._wal is not None and not own_closings:  # durable already: no batch is needed first
                opened += await self._extend_leases(uncovered, now)
                uncovered, self._extending = {}, set()
            opened = [admission for admission in opened if not self._log_and_grant(*admission)]
            uncovered_requests = [pending for requests in uncovered.values() for pending in requests]
            await self._write(opened, own_closings, now, uncovered_requests)
            if uncovered:
                await self._write(await self._extend_leases(uncovered, now), [], now)
        except Exception:
            reject(pending for pending, _, _ in opened)
            reject(pending for requests in uncovered.values() for pending in requests)
            # `_amend` settles these closings after this gateway has registered again; it skips rows that are closed.
            queue.closed += [*closed, *closings]
            raise
        finally:
            self._extending = set()
        for closing in previous_closings:
            await self._amend(closing, previous_closings)
        queue.resolve(flushes)

    def _admit(self, now: float) -> tuple[list[Opened], ReservationsByKey]:
        """Reserve tokens for the waiting requests whose keys have enough tokens in their leases in memory.

        Returns:
            The admitted requests with their reservations, and the requests that need a larger lease, by key id.
        """
        opened: list[Opened] = []
        uncovered: ReservationsByKey = {}
        deferred: list[PendingReservation] = []
        for _ in range(min(len(self.queue.reservations), _MAX_BATCH_REQUESTS)):
            pending = self.queue.reservations.popleft()
            if not pending.waiting:
                continue
            principal = pending.request.principal
            admission = None if principal.key_id in uncovered else self.budgets.admit(pending.request, now, self.close)
            if admission is not None:
                opened.append((pending, *admission))
            elif (waiting := uncovered.setdefault(principal.key_id, [])) and waiting[0].request.principal != principal:
                deferred.append(pending)  # the key was changed in between: each transaction handles one cap per key
            else:
                waiting.append(pending)
        self.queue.reservations.extendleft(reversed(deferred))
        return opened, uncovered

    def _log_and_grant(self, pending: PendingReservation, reservation: Reservation, record: Record) -> bool:
        """Write a reservation to the write-ahead log, grant it to the waiting request, and return True.

        If there is no log or the log is full, return False. The request then continues to wait.
        """
        if self._wal is None or not self._wal.add(record):
            return False
        pending.grant(reservation)
        return True

    async def _extend_leases(self, uncovered: ReservationsByKey, now: float) -> list[Opened]:
        """Extend the leases of the keys in `uncovered`. Return the requests that now fit, and reject the others."""
        budgets = self.budgets
        waiting = {key: [pending for pending in requests if pending.waiting] for key, requests in uncovered.items()}
        uncovered = {key: requests for key, requests in waiting.items() if requests}
        requests = [[pending.request for pending in requests] for _, requests in sorted(uncovered.items())]
        try:
            grants = await gateways.take_all(self._database, budgets.gateway, requests, budgets.leases, now)
        except Exception as error:  # the transaction was rolled back
            if isinstance(error, DatabaseError | gateways.GatewayRetired):
                log.warning("leases could not be extended: %s", error or type(error).__name__)
                self._heartbeat_due = True  # the next batch finds the cause
            else:
                log.exception("unexpected error while extending leases")
            reject(pending for requests in uncovered.values() for pending in requests)
            return []
        opened: list[Opened] = []
        for grant in grants:
            budgets.adopt(grant, now)
            for pending in uncovered[grant.lease.key_id]:
                request = pending.request
                admission = budgets.admit(request, now, self.close)
                if admission is not None:
                    opened.append((pending, *admission))
                else:
                    pending.reject(over_budget(request.principal, request.tokens, grant.available, grant.ends_at, now))
        return opened

    async def _write(
        self,
        opened: Sequence[Opened],
        closings: Sequence[Closing],
        now: float,
        uncovered: Sequence[PendingReservation] = (),
    ) -> None:
        """Write a batch, grant `opened`, and finish `closings`. If the write fails, reject `opened` and `uncovered`."""
        try:
            written = await self._write_batch([*(pending for pending, _, _ in opened), *uncovered], closings, now)
        except Exception:  # a bug that breaks this batch must not stop later batches
            log.exception("unexpected error while writing a batch of the ledger")
            written = False
        if written:
            for pending, reservation, _ in opened:
                pending.grant(reservation)
        else:
            log.warning("this gateway registers again in the ledger; its open reservations will be closed one by one")
            reject(pending for pending, _, _ in opened)
            await self._retry_until_done(self._rejoin, closings=closings)
            for closing in closings:
                await self._amend(closing, closings)
        finish(closings)

    async def _write_batch(
        self, reservations: Sequence[PendingReservation], closings: Sequence[Closing], now: float
    ) -> bool:
        """Write the next batch. Return False if another gateway has declared this gateway dead and retired it."""
        budgets = self.budgets
        if self._tidy_due:
            budgets.tidy(now)
        activity = self.activity.steps() if self._must_write_activity() else []
        must_write = self._heartbeat_due or activity or not budgets.written
        self._tidy_due = self._heartbeat_due = False
        if not must_write:
            return True
        guard, steps = budgets.next_batch(activity)
        if self._wal is not None:
            self._wal.start_batch(budgets.gateway, budgets.batch + 1)

        async def write() -> bool:
            if await self._database.write(guard, steps):
                return True
            rows = await self._database.fetch("SELECT batch FROM gateways WHERE id = $1", budgets.gateway)
            return bool(rows) and rows[0]["batch"] == budgets.batch  # an earlier attempt was committed

        written = await self._retry_until_done(write, reservations, closings, retried=DatabaseError)
        if written and self._wal is not None:
            self._wal.written()
        return written

    async def _retry_until_done(
        self,
        work: Callable[[], Awaitable[T]],
        reservations: Sequence[PendingReservation] = (),
        closings: Sequence[Closing] = (),
        retried: type[Exception] = Exception,
    ) -> T:
        """Retry `work` until it succeeds.

        Args:
            work: makes one attempt.
            reservations: waiting requests, which are rejected when an attempt fails.
            closings: waiting settlements. If the database is unavailable for long, their callers are woken, and the
                settlements are written later.
            retried: exception type after which `work` is repeated; other exceptions are raised.
        """

        def failed(away_secs: float) -> None:
            reject(reservations)
            self.queue.reject()
            self.queue.resolve()
            if away_secs > _SETTLE_TIMEOUT_SECS:
                finish(closings)
                self.queue.finish()

        return await self.retry.until_done(work, failed, retried)

    async def _rejoin(self) -> None:
        """Retire this gateway's old id if it is still registered, and register the gateway under a new id."""
        previous_gateway = self.budgets.gateway
        if self._wal is not None:
            self._wal.close()
            self._wal = None  # no write-ahead log until `join` has succeeded
        if self._wal_base is not None:
            await catch_up(self._wal_base, self._database)
        gateway_rows = [row for row in await gateways.present(self._database) if row[0] == previous_gateway]
        await gateways.retire_all(self._database, gateway_rows, self._clock())
        await self.join()

    async def _amend(self, closing: Closing, waiting: Sequence[Closing]) -> None:
        """Close a reservation of this gateway's previous id. In a long outage, wake the callers of `waiting`."""

        async def amend() -> None:
            async with self._database.transaction() as sql:
                await gateways.amend(sql, closing.reservation, closing.state, closing.values(self._clock()))

        try:
            await self._retry_until_done(amend, closings=waiting, retried=DatabaseError)
        except Exception:  # a bug: the reservation stays charged in full
            log.exception("unexpected error while closing a reservation; it stays charged in full")
        finish([closing])
