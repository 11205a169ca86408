"""Group commit: changes that arrive during a write form the next batch.

Requests that arrive together share one commit; a request that arrives alone costs one commit. Batches are numbered. If
the connection is lost during a commit, the gateway repeats the batch until the database has stored the batch's number.
The database skips a batch whose number is already stored, so each batch is written exactly once.

A lease holds tokens of an API key's budget that the gateway has taken from the database in advance. If the lease has
enough tokens and there is a write-ahead log, the request only waits until its reservation is in the log. The next batch
writes the reservation to the database. In all other cases, the request waits for the database.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from helexa.core.errors import ApiError, service_unavailable
from helexa.core.logs import quoted
from helexa.cortex.ledger import gateways
from helexa.cortex.ledger.activity_and_usage_totals import Activity, ActivityLog
from helexa.cortex.ledger.leases_windows_and_over_budget import (
    Closing,
    PendingReservation,
    Reservation,
    ReservationRequest,
    over_budget,
)
from helexa.cortex.ledger.reservations_in_memory import Budgets, Record
from helexa.cortex.ledger.storage.database import FIRST_RETRY_SECS, Database, DatabaseError, Retry
from helexa.cortex.ledger.write_ahead_log import WriteAheadLog, catch_up

log = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_BATCH_REQUESTS = 512
_SETTLE_TIMEOUT_SECS = 5.0  # a settlement waits at most this long for an unavailable database
_ACTIVITY_BATCH_ROWS = (
    256  # this many queued rows of the activity log are written at once; fewer wait for a periodic batch
)
# With a write-ahead log: this many unwritten rows of reservations are written at once; fewer wait for a periodic batch.
_LEDGER_BATCH_ROWS = 1000
_MAX_UNWRITTEN_ROWS = 10_000  # with this many unwritten rows of reservations, each new request waits for the database


@dataclass
class _Batch:
    """Requests that wait for the database because the write-ahead log lacks them."""

    # requests whose reservations the next write makes durable
    opened: list[tuple[PendingReservation, Reservation]] = field(default_factory=list)
    closings: list[Closing] = field(default_factory=list)  # settlements and releases that the next write makes durable
    # requests for which the leases have too few tokens, by key id
    uncovered: dict[str, list[PendingReservation]] = field(default_factory=dict)

    def confirm(self) -> None:
        """Wake the callers of `opened` and `closings`, and empty both lists."""
        for pending, reservation in self.opened:
            pending.grant(reservation)
        finish(self.closings)
        self.opened, self.closings = [], []

    def reject(self) -> None:
        """Reject all waiting reservations, because the database does not answer."""
        reject(pending for pending, _ in self.opened)
        reject(pending for requests in self.uncovered.values() for pending in requests)


class GroupCommit:
    """Owns a gateway's budgets: grants reservations, and writes batches.

    Attributes:
        budgets: leases and open reservations; replaced when this gateway registers again.
        reservations: requested reservations that wait for the next batch, in order of arrival.
        activity: rows of the activity log that are not written yet.
        retry: repeats failed database work and records why the database cannot be written.
        ending: True once no new reservations are accepted.
        clean: True if `run` ended with all requested changes in the database.
    """

    def __init__(self, database: Database, clock: Callable[[], float], name: str, wal_base: Path | None = None) -> None:
        """Store the arguments. The caller must call `join` before any other method.

        Args:
            wal_base: the database file, next to which the write-ahead log is stored; None if gateways share a database.
        """
        self.reservations: deque[PendingReservation] = deque()
        self.activity = ActivityLog()
        self.retry = Retry()
        self.ending = self.clean = False
        self._database, self._clock, self._name, self._wal_base = database, clock, name, wal_base
        self._wal: WriteAheadLog | None = None
        self._closings: list[Closing] = []
        self._flushes: list[asyncio.Future[None]] = []
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
                raise DatabaseError(
                    f"cannot open the write-ahead log {error.filename}: {error.strerror}; "
                    "give the gateway's user write access to the folder of the ledger"
                ) from error
            self._wal.start_batch(self.budgets.gateway, self.budgets.batch + 1)

    def admit(self, request: ReservationRequest) -> Reservation | None:
        """Return a reservation made without the database; None if `enqueue` is needed."""
        if self._wal is None or not self._wal.complete:
            return None
        # Requests that wait for the database must not be overtaken, and the next batch must not grow without limit.
        if self.reservations or self.budgets.unwritten >= _MAX_UNWRITTEN_ROWS:
            return None
        if request.principal.key_id in self._extending:
            return None
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
        self.reservations.append(pending)
        self._wake.set()

    def record(self, activity: Activity) -> None:
        """Queue a row of the activity log for a later batch; drop it if the queue is full."""
        self.activity.append(activity)
        if len(self.activity) >= _ACTIVITY_BATCH_ROWS:
            self._wake.set()

    def close(self, closing: Closing) -> None:
        """Settle or release a reservation, at once if the write-ahead log records it.

        Otherwise, the next batch writes the settlement or release, and then wakes the callers of `closing.finished`.
        Once `run` has ended, nothing is written, and the callers are woken at once.
        """
        if self._ended:
            closing.finish()
            return
        is_own = closing.reservation.gateway == self.budgets.gateway
        # While the database extends a lease, the lease in memory must not change.
        can_close = self._wal is not None and is_own and closing.reservation.lease.key_id not in self._extending
        if can_close and self._settle(closing, self._clock()):
            self._wake_if_many_unwritten()
        else:
            self._closings.append(closing)
            self._wake.set()

    async def flush(self) -> None:
        """With a write-ahead log, wait until all rows are written or the database fails.

        Without a write-ahead log, return at once.
        """
        if self._wal is not None and not self._ended:
            flushed = self._next_flush()
            self.wake(tidy=True)
            await flushed

    async def probe(self) -> str | None:
        """Return why the database cannot be written, or None if it can be written.

        If the last successful write is older than about a second, write a batch first to find out.
        """
        if self.retry.problem is None and not self.retry.fresh and not self._ended:
            flushed = self._next_flush()
            self.wake(beat=True)
            await flushed
        return self.retry.problem

    def wake(self, *, tidy: bool = False, beat: bool = False, end: bool = False) -> None:
        """Wake `run` to write a batch.

        Args:
            tidy: also write the activity log, and give unused tokens of idle leases back to the keys' budgets.
            beat: write a batch even if it is empty, as a heartbeat of this gateway.
            end: accept no new reservations, and let `run` return when all changes are written.
        """
        self._tidy_due |= tidy
        self._heartbeat_due |= beat
        self.ending |= end
        self._wake.set()

    async def run(self) -> None:
        """Write batches until `wake(end=True)` was called and all changes are written."""
        try:
            while not (self.ending and self._idle()):
                if self._idle():
                    self._wake.clear()
                    await self._wake.wait()
                try:
                    await self._commit()
                except Exception:
                    log.exception(
                        "unexpected error in a batch of the ledger; the gateway registers in the ledger again"
                    )
                    self._resolve(self._flushes)
                    # without a pause, an error that repeats would keep the CPU busy
                    await asyncio.sleep(FIRST_RETRY_SECS)
                    await self._retry_until_done(self._rejoin, _Batch())
            self.clean = True
        finally:
            self.ending = self._ended = True
            self._release_callers()
            finish(self._closings)
            if self._wal is not None:
                self._wal.close()
                self._wal = None

    def _idle(self) -> bool:
        must_write = self.budgets.unwritten >= _LEDGER_BATCH_ROWS or (self.ending and not self.budgets.written)
        is_queued = self.reservations or self._closings or self._flushes
        return not (is_queued or must_write or self._must_write_activity() or self._tidy_due or self._heartbeat_due)

    def _wake_if_many_unwritten(self) -> None:
        if self.budgets.unwritten >= _LEDGER_BATCH_ROWS:
            self._wake.set()

    def _must_write_activity(self) -> bool:
        rows = len(self.activity)
        return rows >= _ACTIVITY_BATCH_ROWS or (rows > 0 and (self._tidy_due or self.ending))

    async def _commit(self) -> None:
        """Do queued work, at most `_MAX_BATCH_REQUESTS` requests; write up to two batches."""
        now, flushes, closings = self._clock(), list(self._flushes), self._closings
        self._closings = []
        batch = _Batch()
        gateway = self.budgets.gateway
        previous = _Batch(closings=[closing for closing in closings if closing.reservation.gateway != gateway])
        try:
            for closing in closings:
                if closing.reservation.gateway == gateway and not self._settle(closing, now):
                    batch.closings.append(closing)
            self._admit(batch, now)
            if batch.uncovered:
                await self._extend_leases(batch, now)
            await self._write(batch, now)
        except Exception:
            batch.reject()
            # `run` registers this gateway again, which charges its open reservations in full. The next `_commit` finds
            # these closings in `_closings`, and `_amend` corrects the charges.
            self._closings += closings
            raise
        finally:
            self._extending = set()
        # These reservations belong to an earlier registration of this gateway. When that registration was retired, they
        # were charged in full.
        for closing in previous.closings:
            await self._amend(closing, previous)
        self._resolve(flushes)

    def _settle(self, closing: Closing, now: float) -> bool:
        """Apply `closing` in memory; return whether the write-ahead log recorded it."""
        if closing.applied:
            return False
        closing.applied = True
        if not self._log(self.budgets.close(closing, now)):  # not in the log, so the caller waits for the database
            return False
        closing.finish()
        return True

    def _log(self, record: Record) -> bool:
        return self._wal is not None and self._wal.add(record)

    def _open(self, batch: _Batch, pending: PendingReservation, now: float) -> bool:
        """Reserve tokens from the key's lease; return False if the lease has too few."""
        admission = self.budgets.admit(pending.request, now, self.close)
        if admission is None:
            return False
        reservation, record = admission
        # A reservation in the write-ahead log is granted at once. Otherwise, it is granted when the batch is written.
        if self._log(record):
            pending.grant(reservation)
        else:
            batch.opened.append((pending, reservation))
        return True

    def _admit(self, batch: _Batch, now: float) -> None:
        """Open the queued reservations, and collect those that need a larger lease."""
        deferred: list[PendingReservation] = []
        for _ in range(min(len(self.reservations), _MAX_BATCH_REQUESTS)):
            pending = self.reservations.popleft()
            if not pending.waiting:
                continue
            principal = pending.request.principal
            waiting = batch.uncovered.get(principal.key_id, [])
            if waiting and waiting[0].request.principal != principal:
                # The key's settings changed between the first waiting request and this one. A transaction can apply
                # only one cap per key.
                deferred.append(pending)
                continue
            try:
                # If an earlier request of the key waits for a larger lease, this request must not overtake it.
                is_open = not waiting and self._open(batch, pending, now)
            except Exception:
                # `_commit` rejects only the requests in `batch`, which does not contain these requests yet.
                reject([pending, *deferred])
                raise
            if not is_open:
                batch.uncovered.setdefault(principal.key_id, []).append(pending)
        self.reservations.extendleft(reversed(deferred))

    async def _extend_leases(self, batch: _Batch, now: float) -> None:
        """Extend the leases of the keys in `uncovered`; open or reject their reservations."""
        self._extending = set(batch.uncovered)
        # Before a lease is extended, all its changes must be durable. Changes in the write-ahead log are durable; the
        # changes in `opened` and `closings` are not in the log, and must first be written to the database.
        if self._wal is None or batch.opened or batch.closings:
            await self._write(batch, now)
        budgets = self.budgets  # read after the write, which may have replaced `self.budgets`
        waiting = {
            key: [pending for pending in requests if pending.waiting] for key, requests in batch.uncovered.items()
        }
        requests = [[pending.request for pending in waiting[key]] for key in sorted(waiting) if waiting[key]]
        try:
            grants = await gateways.take_all(self._database, budgets.gateway, requests, budgets.leases, now)
        except Exception as error:  # the transaction was rolled back
            if isinstance(error, DatabaseError | gateways.GatewayRetired):
                log.warning("tokens not reserved in the database error=%s; the requests got 503", quoted(error))
                self._heartbeat_due = True  # the next batch finds out whether this gateway was retired
            else:
                log.exception("unexpected error while reserving tokens in the database; the requests got 503")
            batch.reject()
            grants = []
        for grant in grants:
            budgets.adopt(grant, now)
            for pending in waiting[grant.lease.key_id]:
                request = pending.request
                if not self._open(batch, pending, now):
                    pending.reject(over_budget(request.principal, request.tokens, grant.available, grant.ends_at, now))
        batch.uncovered, self._extending = {}, set()

    async def _write(self, batch: _Batch, now: float) -> None:
        """Write a batch and wake its callers; on failure, register this gateway again."""
        try:
            written = await self._write_batch(batch, now)
        except Exception:  # a bug that breaks this batch must not stop later batches
            log.exception("unexpected error while writing a batch of the ledger; the requests of this batch get 503")
            written = False
        if not written:
            log.warning(
                "batch not written to the ledger, so the gateway registers again gateway=%d; open reservations are "
                "charged in full until their requests end",
                self.budgets.gateway,
            )
            batch.reject()
            batch.opened = []  # the database has no rows of these reservations
            await self._retry_until_done(self._rejoin, batch)
            for closing in batch.closings:
                await self._amend(closing, batch)
        batch.confirm()

    async def _write_batch(self, batch: _Batch, now: float) -> bool:
        """Write the next batch, if any; return False if this gateway has been retired."""
        budgets = self.budgets
        if self._tidy_due:
            budgets.tidy(now)
        activity = self.activity.steps() if self._must_write_activity() else []
        must_write = self._heartbeat_due or activity or not budgets.written
        self._tidy_due = self._heartbeat_due = False
        if not must_write:
            return True
        guard, steps = budgets.next_batch(activity)
        # Records that arrive during the write belong to the next batch.
        if self._wal is not None:
            self._wal.start_batch(budgets.gateway, budgets.batch + 1)

        async def write() -> bool:
            if await self._database.write(guard, steps):
                return True
            # The batch is also written if an earlier attempt was committed, but its answer was lost.
            rows = await self._database.fetch("SELECT batch FROM gateways WHERE id = $1", budgets.gateway)
            return bool(rows) and rows[0]["batch"] == budgets.batch

        written = await self._retry_until_done(write, batch, retried=DatabaseError)
        if written and self._wal is not None:
            self._wal.written()
        return written

    async def _retry_until_done(
        self, work: Callable[[], Awaitable[T]], batch: _Batch, retried: type[Exception] = Exception
    ) -> T:
        """Repeat `work` until it succeeds, and return its result.

        When an attempt fails, all waiting reservations are rejected, and `flush` calls return. After
        `_SETTLE_TIMEOUT_SECS` of failures, the callers that wait for settlements are woken, and the settlements are
        written later.

        Args:
            batch: the reservations to reject and the settlements whose callers wait.
            retried: exception type after which `work` is repeated; other exceptions are raised.
        """

        def failed(away_secs: float) -> None:
            batch.reject()
            self._release_callers()
            # A client gets the last bytes of its response only after the settlement, so the wait must end.
            if away_secs > _SETTLE_TIMEOUT_SECS:
                finish([*batch.closings, *self._closings])

        return await self.retry.until_done(work, failed, retried)

    async def _rejoin(self) -> None:
        """Retire this gateway's old id, and register the gateway under a new id."""
        previous_gateway = self.budgets.gateway
        if self._wal is not None:
            self._wal.close()
            self._wal = None  # no write-ahead log until `join` has succeeded
        if self._wal_base is not None:
            await catch_up(self._wal_base, self._database)
        gateway_rows = [row for row in await gateways.present(self._database) if row[0] == previous_gateway]
        await gateways.retire_all(self._database, gateway_rows, self._clock())
        await self.join()

    async def _amend(self, closing: Closing, batch: _Batch) -> None:
        """Correct the charge of a reservation made under this gateway's previous id."""

        async def amend() -> None:
            async with self._database.transaction() as sql:
                await gateways.amend(sql, closing.reservation, closing.state, closing.values(self._clock()))

        try:
            await self._retry_until_done(amend, batch, retried=DatabaseError)
        except Exception:  # a bug: the reservation stays charged in full
            log.exception(
                "unexpected error while charging a request request_id=%s; all its reserved tokens stay charged",
                quoted(closing.reservation.request_id),
            )
        closing.finish()

    def _next_flush(self) -> asyncio.Future[None]:
        """Return a future that is resolved when the next batch is written or fails."""
        flush: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flushes.append(flush)
        return flush

    def _resolve(self, flushes: Iterable[asyncio.Future[None]]) -> None:
        for flush in flushes:
            if not flush.done():
                flush.set_result(None)
        self._flushes = [flush for flush in self._flushes if not flush.done()]

    def _release_callers(self) -> None:
        """Reject all queued reservations and wake all `flush` calls."""
        reject(self.reservations)
        self.reservations.clear()
        self._resolve(self._flushes)


def unavailable() -> ApiError:
    """Return the 503 error for a reservation that cannot be committed."""
    return service_unavailable("the ledger's database does not answer; retry in 5 s", retry_after=5)


def reject(reservations: Iterable[PendingReservation]) -> None:
    """Reject reservations of a batch because the database does not answer."""
    for request in reservations:
        request.reject(unavailable())


def finish(closings: Iterable[Closing]) -> None:
    """Wake all callers that wait for these settlements and releases."""
    for closing in closings:
        closing.finish()
