"""The group commit: all that is asked for while the database works on one batch goes into the next.

So a request costs microseconds when many come at once, and one commit when it comes alone. Batches are numbered, and
one whose fate a lost connection left open is tried again until the database knows its number: each is written once.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from helexa.core.errors import ApiError, service_unavailable
from helexa.cortex.ledger import gateways
from helexa.cortex.ledger.activity import Activity, ActivityLog
from helexa.cortex.ledger.budgets import Budgets
from helexa.cortex.ledger.database import Database, DatabaseError
from helexa.cortex.ledger.lease import over_budget
from helexa.cortex.ledger.reservation import Asked, Closing, Reservation

log = logging.getLogger(__name__)
T = TypeVar("T")
Opened = tuple[Asked, Reservation]

_MOST_IN_BATCH = 512
_PATIENCE_SECS = 5.0  # a settlement waits so long for a database that is away
_RETRY_SECS = 0.25
_MANY_ROWS = 256  # of the activity log; fewer wait for the next tidying


class Committer:
    """The one owner of a gateway's budgets: it decides, writes, and then tells those who wait.

    Attributes:
        budgets: leases and open reservations; replaced when this gateway was taken for dead.
        asked: reservations to decide, in their order.
        activity: rows of the activity log to write.
        down: the database does not answer.
        ending: nothing new is taken.
    """

    def __init__(self, database: Database, clock: Callable[[], float], name: str) -> None:
        self.asked: deque[Asked] = deque()
        self.activity = ActivityLog()
        self.down = self.ending = False
        self._database, self._clock, self._name = database, clock, name
        self._closings: list[Closing] = []
        self._wake = asyncio.Event()
        self._tidying = self._beating = self._ended = False

    async def join(self) -> None:
        """Become a gateway of this database, with budgets of its own."""
        self.budgets = Budgets(await gateways.join(self._database, self._name))

    def ask(self, asked: Asked) -> None:
        """Decide a reservation with the next batch."""
        self.asked.append(asked)
        self._wake.set()

    def record(self, activity: Activity) -> None:
        """Write a row of the activity log with the next batch that tidies up, or that has many of them."""
        self.activity.append(activity)
        if len(self.activity) >= _MANY_ROWS:
            self._wake.set()

    def close(self, closing: Closing) -> None:
        """Settle or release with the next batch."""
        if self._ended:
            _finish([closing])
        else:
            self._closings.append(closing)
            self._wake.set()

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
        """Make batches until told to end."""
        try:
            while not (self.ending and self._idle()):
                if self._idle():
                    self._wake.clear()
                    await self._wake.wait()
                await self._commit()
        except Exception:
            log.exception("the ledger has stopped")
        finally:
            self.ending = self._ended = True
            _finish(self._closings)
            _refuse(self.asked, unavailable())

    def _idle(self) -> bool:
        return not (self.asked or self._closings or self._logging() or self._tidying or self._beating)

    def _logging(self) -> bool:
        """Whether rows of the activity log are due."""
        rows = len(self.activity)
        return rows >= _MANY_ROWS or (rows > 0 and (self._tidying or self.ending))

    async def _commit(self) -> None:
        now, budgets = self._clock(), self.budgets
        ours: list[Closing] = []
        late: list[Closing] = []
        for closing in self._closings:
            if closing.reservation.gateway == budgets.gateway:
                budgets.close(closing, now)
                ours.append(closing)
            else:
                late.append(closing)
        self._closings = []
        opened, short = self._admit(now)
        await self._write(opened, ours, now, [asked for group in short.values() for asked in group])
        if short:  # only now: what is taken is reckoned from what is written
            await self._write(await self._take(short, now), [], now)
        for closing in late:
            await self._amend(closing)

    def _admit(self, now: float) -> tuple[list[Opened], dict[str, list[Asked]]]:
        """Decide what waits: what leases suffice for, and by key what they do not."""
        opened: list[Opened] = []
        short: dict[str, list[Asked]] = {}
        again: list[Asked] = []
        for _ in range(min(len(self.asked), _MOST_IN_BATCH)):
            asked = self.asked.popleft()
            if asked.answer.done():
                continue
            key_id = asked.principal.key_id
            reservation = None if key_id in short else self.budgets.admit(asked, now, self.close)
            if reservation is not None:
                opened.append((asked, reservation))
            elif (others := short.setdefault(key_id, [])) and others[0].principal != asked.principal:
                again.append(asked)  # the key has just been changed: one cap at a time
            else:
                others.append(asked)
        self.asked.extendleft(reversed(again))
        return opened, short

    async def _take(self, short: dict[str, list[Asked]], now: float) -> list[Opened]:
        """Take tokens for keys whose lease does not suffice. A refusal is answered at once."""
        budgets = self.budgets
        short = {key: waiting for key, group in short.items() if (waiting := _still_waiting(group))}
        try:
            async with self._database.transaction() as sql:
                await gateways.lock(sql, budgets.gateway)
                taken = [
                    await gateways.take(
                        sql, budgets.gateway, group[0].principal, [asked.tokens for asked in group], budgets.leases, now
                    )
                    for _, group in sorted(short.items())
                ]
        except (DatabaseError, gateways.Swept) as error:
            log.warning("no budget could be read: %s", error or type(error).__name__)
            self._beating = True  # the next batch finds out what is the matter
            _refuse((asked for group in short.values() for asked in group), unavailable())
            return []
        opened: list[Opened] = []
        for one in taken:
            budgets.adopt(one, now)
            for asked in short[one.lease.key_id]:
                reservation = budgets.admit(asked, now, self.close)
                if reservation is not None:
                    opened.append((asked, reservation))
                else:
                    _refuse([asked], over_budget(asked.principal, asked.tokens, one.available, one.ends_at, now))
        return opened

    async def _write(
        self, opened: Sequence[Opened], closings: Sequence[Closing], now: float, next_up: Sequence[Asked] = ()
    ) -> None:
        """Write what there is, and tell those who wait; also those `next_up`, if the database does not answer."""
        try:
            written = await self._write_batch([*(asked for asked, _ in opened), *next_up], closings, now)
        except Exception:  # a fault of ours in this batch must not stop all that follow
            log.exception("a batch of the ledger failed")
            written = False
        if written:
            for asked, reservation in opened:
                if asked.answer.done():  # cancelled, or told to come back later
                    reservation.abandon()
                else:
                    asked.answer.set_result(reservation)
        else:
            log.warning("this gateway begins anew; reservations that are still open will be closed one by one")
            _refuse((asked for asked, _ in opened), unavailable())
            await self._insist(self._start_over)
            for closing in closings:
                await self._amend(closing)
        _finish(closings)

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

        async def write() -> bool:
            if await self._database.write(guard, steps):
                return True
            rows = await self._database.fetch("SELECT batch FROM gateways WHERE id = $1", budgets.gateway)
            return bool(rows) and rows[0]["batch"] == budgets.batch  # written, though the connection was lost then

        return await self._insist(write, asked, closings)

    async def _insist(
        self, work: Callable[[], Awaitable[T]], asked: Sequence[Asked] = (), closings: Sequence[Closing] = ()
    ) -> T:
        """Do it, again and again if need be, until the database answers."""
        began = time.monotonic()
        while True:
            try:
                outcome = await work()
            except DatabaseError as error:
                if not self.down:
                    log.error("%s; no budget can be reserved until it does", error)
                self.down = True
                _refuse(asked, unavailable())
                _refuse(self.asked, unavailable())
                self.asked.clear()
                if time.monotonic() - began > _PATIENCE_SECS:
                    _finish(closings)
                    _finish(self._closings)
                await asyncio.sleep(_RETRY_SECS)
            else:
                self.down = False
                return outcome

    async def _start_over(self) -> None:
        """Become a new gateway; the old one, if it still has a name, is laid to rest."""
        gone = self.budgets.gateway
        known = [row for row in await gateways.present(self._database) if row[0] == gone]
        await gateways.sweep(self._database, known, self._clock())
        await self.join()

    async def _amend(self, closing: Closing) -> None:
        """Close a reservation of the gateway that this one was before."""

        async def amend() -> None:
            async with self._database.transaction() as sql:
                await gateways.amend(sql, closing.reservation, closing.state, closing.values(self._clock()))

        try:
            await self._insist(amend, closings=[closing])
        except Exception:  # a fault of ours: it stays charged in full
            log.exception("a reservation could not be closed")
        _finish([closing])


def unavailable() -> ApiError:
    """The database does not answer."""
    return service_unavailable("the ledger does not answer", retry_after=5)


def _still_waiting(group: Iterable[Asked]) -> list[Asked]:
    return [asked for asked in group if not asked.answer.done()]


def _refuse(asked: Iterable[Asked], error: ApiError) -> None:
    for one in asked:
        if not one.answer.done():
            one.answer.set_exception(error)


def _finish(closings: Iterable[Closing]) -> None:
    for closing in closings:
        if not closing.done.done():
            closing.done.set_result(None)
