"""The ledger of one gateway: reserve, settle, release, and the log of what went on."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

from helexa.core.errors import overloaded, shutting_down
from helexa.cortex.access.principal import Principal
from helexa.cortex.ledger import gateways
from helexa.cortex.ledger.activity import Activity, recent
from helexa.cortex.ledger.committer import Committer
from helexa.cortex.ledger.journal import catch_up
from helexa.cortex.ledger.lease import over_budget
from helexa.cortex.ledger.periodic import repeat
from helexa.cortex.ledger.reservation import Asked, Claim, Reservation, bounded, plain
from helexa.cortex.ledger.statement import Budget, budget
from helexa.cortex.ledger.storage.database import Database, DatabaseError
from helexa.cortex.ledger.waiting import unavailable

log = logging.getLogger(__name__)

MOST_WAITING = 10_000
_TIDY_SECS = 0.25
_HEARTBEAT_SECS = 2.0
_DEAD_AFTER_SECS = 15.0
_CLOSE_SECS = 10.0
_PROBE_SECS = 2.0


class Ledger:
    """Budgets and activity, as one gateway keeps them in the database that it may share with others.

    Spend survives the death of a process. A power failure may take the last moments of spend from SQLite, but no
    change of a key.
    """

    def __init__(
        self,
        database: Database,
        *,
        clock: Callable[[], float] = time.time,
        dead_after_secs: float = _DEAD_AFTER_SECS,
    ) -> None:
        """Nothing happens before `start`.

        Args:
            database: open, its tables up to date; the ledger does not close it.
            clock: Unix seconds, for windows and idleness.
            dead_after_secs: gateways that show no life for so long are taken for dead.
        """
        self._database = database
        self._clock = clock
        self._watch = gateways.Watch(dead_after_secs)
        self._heartbeat_secs = min(_HEARTBEAT_SECS, dead_after_secs / 4)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take a gateway's place in the database.

        Raises:
            HelexaError: the database is another gateway's alone.
            DatabaseError: the database does not answer.
        """
        alone = await self._database.claim()
        self._committer = Committer(self._database, self._clock, socket.gethostname(), alone)
        if alone is not None:  # whoever was here before is gone
            await catch_up(alone, self._database)
            await gateways.sweep(self._database, await gateways.present(self._database), self._clock())
        await self._committer.join()
        self._tasks = [asyncio.create_task(self._committer.run()), asyncio.create_task(self._keep_tidy())]
        if alone is None:
            watching = repeat(self._watch_gateways, self._heartbeat_secs, "other gateways cannot be watched")
            self._tasks.append(asyncio.create_task(watching))

    async def close(self) -> None:
        """Write what waits and leave the database to others. Reservations still open are charged in full."""
        self._committer.wake(end=True)
        try:
            async with asyncio.timeout(_CLOSE_SECS):
                await asyncio.shield(self._tasks[0])
                if not self._committer.clean:  # what it leaves is for the next start to see
                    raise DatabaseError("the ledger had stopped")
                budgets = self._committer.budgets
                await gateways.sweep(self._database, [(budgets.gateway, budgets.batch)], self._clock())
        except (TimeoutError, DatabaseError) as error:
            log.warning("the ledger was closed without its database: %s", error or type(error).__name__)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    @property
    def open(self) -> int:
        """How many reservations are neither settled nor released."""
        return len(self._committer.budgets.open)

    @property
    def available(self) -> bool:
        """Whether the database could be written when it was last tried."""
        return self._committer.retry.problem is None

    async def writable(self) -> bool:
        """Return whether the database can be written now, or could within the last second."""
        if self._committer.ending:
            return False
        try:
            async with asyncio.timeout(_PROBE_SECS):
                return await self._committer.probe() is None
        except TimeoutError:
            return False

    async def reserve(self, principal: Principal, request_id: str, model: str, tokens: int) -> Reservation:
        """Hold tokens of the key's budget; durable on return. A key without a cap is recorded all the same.

        Args:
            principal: whose key.
            request_id: name of the request in the ledger. Each call is a reservation of its own, whatever the name.
            model: the resolved model id.
            tokens: the most that the request may use.

        Raises:
            ApiError: 429 `insufficient_quota` or `rate_limit_exceeded` (with Retry-After) when the budget does not
                suffice; 503 when too many wait, the database does not answer, or the ledger is being closed.
        """
        committer = self._committer
        if committer.ending:
            raise shutting_down()
        if committer.retry.problem is not None:
            raise unavailable()
        if len(committer.waiting.asked) >= MOST_WAITING:
            raise overloaded("too many requests wait for the ledger", retry_after=1)
        claim = Claim(principal, plain(request_id), plain(model), max(1, bounded(tokens)))
        reservation = committer.admit(claim)
        if reservation is not None:
            return reservation
        answer: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        committer.ask(Asked(claim, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            if not answer.cancelled() and answer.exception() is None:  # it came in the moment of the cancellation
                answer.result().abandon()
            raise

    def record(self, activity: Activity) -> None:
        """Put a request into the activity log, soon; nobody waits for it."""
        self._committer.record(activity)

    async def flush(self) -> None:
        """Have all that the journal knows in the database, if that answers: for those who read there."""
        await self._committer.flush()

    async def recent(
        self, limit: int = 100, before: int | None = None, **filters: str | int | None
    ) -> list[dict[str, Any]]:
        """The activity log, newest first: see `activity.recent`."""
        await self.flush()
        return await recent(self._database, limit, before, **filters)

    async def budget(self, principal: Principal) -> Budget:
        """Where the key stands in its window."""
        await self.flush()
        return await budget(self._database, principal, self._clock())

    async def check_budget(self, principal: Principal) -> None:
        """Refuse work for a key whose budget is used up, without holding anything.

        Raises:
            ApiError: 429 as from `reserve`; 503 if the database does not answer.
        """
        cap = principal.hard_cap
        if cap is None:
            return
        now = self._clock()
        try:
            state = await budget(self._database, principal, now)
        except DatabaseError as error:
            raise unavailable() from error
        if state.spent >= cap:
            ends_at = now + principal.window.seconds if state.ends_at is None else state.ends_at
            raise over_budget(principal, 1, 0, ends_at, now)

    async def _keep_tidy(self) -> None:
        while True:
            await asyncio.sleep(_TIDY_SECS)
            self._committer.wake(tidy=True)

    async def _watch_gateways(self) -> None:
        """Show that this gateway lives, and retire gateways that do not."""
        self._committer.wake(beat=True)
        own = self._committer.budgets.gateway
        others = [row for row in await gateways.present(self._database) if row[0] != own]
        await gateways.sweep(self._database, self._watch.dead(others, time.monotonic()), self._clock())
