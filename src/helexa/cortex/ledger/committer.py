"""The group commit: all that is asked for while the database works on one batch goes into the next.

So a request costs microseconds when many come at once, and one commit when it comes alone. Batches are numbered, and
one whose fate a lost connection left open is tried again until the database knows its number: each is written once.

With a journal only those whose key has to take tokens wait for the database, and those who ask meanwhile: what a lease
suffices for is a line in the journal, and is gathered for the next batch.
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
from helexa.cortex.ledger.journal import Journal, catch_up
from helexa.cortex.ledger.lease import over_budget
from helexa.cortex.ledger.reservation import Asked, Claim, Closing, Reservation
from helexa.cortex.ledger.storage.database import Database, DatabaseError
from helexa.cortex.ledger.storage.retry import FIRST_RETRY_SECS, Retry
from helexa.cortex.ledger.waiting import Waiting, finish, refuse

log = logging.getLogger(__name__)
T = TypeVar("T")
Opened = tuple[Asked, Reservation, Record]

_MOST_IN_BATCH = 512
_PATIENCE_SECS = 5.0  # a settlement waits so long for a database that is away
_MANY_ROWS = 256  # of the activity log; fewer wait for the next tidying
_MANY_UNWRITTEN = 1000  # in the journal; likewise
_MOST_UNWRITTEN = 10_000  # in the journal; with more, each request waits for the database


class Committer:
    """The one owner of a gateway's budgets: it decides, writes, and then tells those who wait.

    Attributes:
        budgets: leases and open reservations; replaced when this gateway was taken for dead.
        waiting: what waits for the next batch.
        activity: rows of the activity log to write.
        retry: repeats what fails, and knows why the database cannot be written.
        ending: nothing new is taken.
        clean: it came to its end, and all that was asked of it is in the database.
    """

    def __init__(self, database: Database, clock: Callable[[], float], name: str, alone: Path | None = None) -> None:
        """Nothing is written before `join`.

        Args:
            database: where to.
            clock: Unix seconds.
            name: of this gateway, for people.
            alone: the database's file, if it is this gateway's alone.
        """
        self.waiting = Waiting()
        self.activity = ActivityLog()
        self.retry = Retry()
        self.ending = self.clean = False
        self._database, self._clock, self._name, self._alone = database, clock, name, alone
        self._journal: Journal | None = None
        self._taking: set[str] = set()  # keys whose leases are just being reckoned
        self._wake = asyncio.Event()
        self._tidying = self._beating = self._ended = False

    async def join(self) -> None:
        """Become a gateway of this database, with budgets of its own.

        Raises:
            DatabaseError: the database does not answer, or no journal can be kept beside it.
        """
        self.budgets = Budgets(await gateways.join(self._database, self._name))
        if self._alone is not None:
            try:
                self._journal = Journal(self._alone)
            except OSError as error:
                raise DatabaseError(f"cannot keep a journal beside {self._alone}: {error.strerror}") from error
            self._journal.turn(self.budgets.gateway, self.budgets.batch + 1)

    def admit(self, claim: Claim) -> Reservation | None:
        """Decide a reservation at once; None if that cannot be done, or not without asking the database."""
        if self._journal is None or not self._journal.whole:
            return None
        if self.waiting.asked or self.budgets.unwritten >= _MOST_UNWRITTEN:
            return None
        admitted = None
        if claim.principal.key_id not in self._taking:
            admitted = self.budgets.admit(claim, self._clock(), self.close)
        if admitted is None:
            return None
        reservation, record = admitted
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
        """Write a row of the activity log with the next batch that tidies up, or that has many of them."""
        self.activity.append(activity)
        if len(self.activity) >= _MANY_ROWS:
            self._wake.set()

    def close(self, closing: Closing) -> None:
        """Settle or release: at once with a journal, else with the next batch."""
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
        """Wait until what the journal and the activity log have gathered is in the database, if it answers."""
        if self._journal is not None and not self._ended:
            flushed = self.waiting.next_flush()
            self.wake(tidy=True)
            await flushed

    async def probe(self) -> str | None:
        """Return why the database cannot be written, or None if a batch was written within the last second or now."""
        if self.retry.problem is None and not self.retry.fresh and not self._ended:
            written = self.waiting.next_flush()
            self.wake(beat=True)
            await written
        return self.retry.problem

    def wake(self, *, tidy: bool = False, beat: bool = False, end: bool = False) -> None:
        """Make a batch soon.

        Args:
            tidy: give back what lies idle.
            beat: write one even if nothing waits, to show that this gateway lives.
            end: return from `run` once nothing waits.
        """
        self._tidying |= tidy
        self._beating |= beat
        self.ending |= end
        self._wake.set()

    async def run(self) -> None:
        """Make batches until told to end. No exception ends it: after an unexpected one this gateway starts over."""
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
        unwritten = self.budgets.unwritten >= _MANY_UNWRITTEN or (self.ending and not self.budgets.written)
        return not (self.waiting or unwritten or self._logging() or self._tidying or self._beating)

    def _wake_for_many(self) -> None:
        if self.budgets.unwritten >= _MANY_UNWRITTEN:
            self._wake.set()

    def _logging(self) -> bool:
        """Whether rows of the activity log are due."""
        rows = len(self.activity)
        return rows >= _MANY_ROWS or (rows > 0 and (self._tidying or self.ending))

    async def _commit(self) -> None:
        now, budgets, waiting = self._clock(), self.budgets, self.waiting
        flushes = list(waiting.flushes)
        closed, closings = waiting.closed, waiting.closings
        waiting.closed, waiting.closings = [], []
        ours = [closing for closing in closed if closing.reservation.gateway == budgets.gateway]
        late = [closing for closing in closed if closing.reservation.gateway != budgets.gateway]
        opened: list[Opened] = []
        short: dict[str, list[Asked]] = {}
        try:
            for closing in closings:
                if closing.reservation.gateway != budgets.gateway:
                    late.append(closing)
                    continue
                record = budgets.close(closing, now)
                if self._journal is not None and self._journal.add(record):
                    closing.finish()
                else:
                    ours.append(closing)
            opened, short = self._admit(now)
            self._taking = set(short)  # from here on, what a lease counts is what is durable of it
            if short and self._journal is not None and not ours:  # all of it is: no batch need come first
                opened += await self._take(short, now)
                short, self._taking = {}, set()
            opened = [one for one in opened if not self._note(*one)]
            await self._write(opened, ours, now, [asked for group in short.values() for asked in group])
            if short:
                await self._write(await self._take(short, now), [], now)
        except Exception:
            refuse(asked for asked, _, _ in opened)
            refuse(asked for group in short.values() for asked in group)
            # Amended after this gateway has started over; what is in the database already is not changed by that.
            waiting.closed += [*closed, *closings]
            raise
        finally:
            self._taking = set()
        for closing in late:
            await self._amend(closing, late)
        waiting.resolve(flushes)

    def _admit(self, now: float) -> tuple[list[Opened], dict[str, list[Asked]]]:
        """Decide what waits: what leases suffice for, and by key what they do not."""
        opened: list[Opened] = []
        short: dict[str, list[Asked]] = {}
        again: list[Asked] = []
        for _ in range(min(len(self.waiting.asked), _MOST_IN_BATCH)):
            asked = self.waiting.asked.popleft()
            if not asked.waiting:
                continue
            principal = asked.claim.principal
            admitted = None if principal.key_id in short else self.budgets.admit(asked.claim, now, self.close)
            if admitted is not None:
                opened.append((asked, *admitted))
            elif (others := short.setdefault(principal.key_id, [])) and others[0].claim.principal != principal:
                again.append(asked)  # the key has just been changed: one cap at a time
            else:
                others.append(asked)
        self.waiting.asked.extendleft(reversed(again))
        return opened, short

    def _note(self, asked: Asked, reservation: Reservation, record: Record) -> bool:
        """Answer somebody who waits as soon as the journal has it; False if it must be in the next batch."""
        if self._journal is None or not self._journal.add(record):
            return False
        asked.grant(reservation)
        return True

    async def _take(self, short: dict[str, list[Asked]], now: float) -> list[Opened]:
        """Take tokens for keys whose lease does not suffice. A refusal is answered at once."""
        budgets = self.budgets
        short = {
            key: waiting for key, group in short.items() if (waiting := [asked for asked in group if asked.waiting])
        }
        try:
            async with self._database.transaction() as sql:
                await gateways.lock(sql, budgets.gateway)
                taken = [
                    await gateways.take(
                        sql,
                        budgets.gateway,
                        group[0].claim.principal,
                        [asked.claim.tokens for asked in group],
                        budgets.leases,
                        now,
                    )
                    for _, group in sorted(short.items())
                ]
        except Exception as error:  # nothing was taken
            if isinstance(error, DatabaseError | gateways.Swept):
                log.warning("no budget could be read: %s", error or type(error).__name__)
                self._beating = True  # the next batch finds out what is the matter
            else:
                log.exception("no budget could be taken")
            refuse(asked for group in short.values() for asked in group)
            return []
        opened: list[Opened] = []
        for one in taken:
            budgets.adopt(one, now)
            for asked in short[one.lease.key_id]:
                claim = asked.claim
                admitted = budgets.admit(claim, now, self.close)
                if admitted is not None:
                    opened.append((asked, *admitted))
                else:
                    asked.refuse(over_budget(claim.principal, claim.tokens, one.available, one.ends_at, now))
        return opened

    async def _write(
        self, opened: Sequence[Opened], closings: Sequence[Closing], now: float, next_up: Sequence[Asked] = ()
    ) -> None:
        """Write what there is, and tell those who wait; also those `next_up`, if the database does not answer."""
        try:
            written = await self._write_batch([*(asked for asked, _, _ in opened), *next_up], closings, now)
        except Exception:  # a fault of ours in this batch must not stop all that follow
            log.exception("a batch of the ledger failed")
            written = False
        if written:
            for asked, reservation, _ in opened:
                asked.grant(reservation)
        else:
            log.warning("this gateway begins anew; reservations that are still open will be closed one by one")
            refuse(asked for asked, _, _ in opened)
            await self._insist(self._start_over, closings=closings)
            for closing in closings:
                await self._amend(closing, closings)
        finish(closings)

    async def _write_batch(self, asked: Sequence[Asked], closings: Sequence[Closing], now: float) -> bool:
        """False if this gateway was taken for dead."""
        budgets = self.budgets
        if self._tidying:
            budgets.tidy(now)
        activity = self.activity.steps() if self._logging() else []
        needed = self._beating or activity or not budgets.written
        self._tidying = self._beating = False
        if not needed:
            return True
        guard, steps = budgets.next_batch(activity)
        if self._journal is not None:
            self._journal.turn(budgets.gateway, budgets.batch + 1)

        async def write() -> bool:
            if await self._database.write(guard, steps):
                return True
            rows = await self._database.fetch("SELECT batch FROM gateways WHERE id = $1", budgets.gateway)
            return bool(rows) and rows[0]["batch"] == budgets.batch  # written, though the connection was lost then

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
            asked: reservations to refuse when an attempt fails.
            closings: settlements that stop waiting when the database is away for long; they are written later.
            retried: the exceptions to retry after. Others are raised.
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
        """Become a new gateway; the old one, if it still has a name, is laid to rest."""
        gone = self.budgets.gateway
        if self._journal is not None:
            self._journal.close()
            self._journal = None  # until this is a gateway again
        if self._alone is not None:
            await catch_up(self._alone, self._database)
        known = [row for row in await gateways.present(self._database) if row[0] == gone]
        await gateways.sweep(self._database, known, self._clock())
        await self.join()

    async def _amend(self, closing: Closing, waiting: Sequence[Closing]) -> None:
        """Close a reservation of the gateway that this one was before; `waiting` are closed with or after it."""

        async def amend() -> None:
            async with self._database.transaction() as sql:
                await gateways.amend(sql, closing.reservation, closing.state, closing.values(self._clock()))

        try:
            await self._insist(amend, closings=waiting, retried=DatabaseError)
        except Exception:  # a fault of ours: it stays charged in full
            log.exception("a reservation could not be closed")
        finish([closing])
