"""The ledger of one gateway: reserve, settle and release tokens."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from helexa.core.errors import overloaded, shutting_down
from helexa.core.logs import quoted
from helexa.cortex.access.keys import Principal
from helexa.cortex.ledger import gateways
from helexa.cortex.ledger.activity_and_usage_totals import Activity, charges, recent
from helexa.cortex.ledger.group_commit import GroupCommit, unavailable
from helexa.cortex.ledger.leases_windows_and_over_budget import (
    PendingReservation,
    Reservation,
    ReservationRequest,
    bounded,
    over_budget,
)
from helexa.cortex.ledger.reservations_in_memory import Budget, budget, budgets
from helexa.cortex.ledger.storage.database import Database, DatabaseError, plain, repeat
from helexa.cortex.ledger.write_ahead_log import catch_up

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
_TIDY_SECS = 0.25
_HEARTBEAT_SECS = 2.0
_DEAD_AFTER_SECS = 15.0
_CLOSE_SECS = 10.0
_PROBE_SECS = 2.0


class Ledger:
    """Token budgets and activity log of one gateway.

    Charges survive a crash of the process. With SQLite, a power failure may lose the charges of the last moments.
    """

    def __init__(
        self,
        database: Database,
        *,
        clock: Callable[[], float] = time.time,
        dead_after_secs: float = _DEAD_AFTER_SECS,
    ) -> None:
        """Store the arguments. The caller must call `start` before any other method.

        Args:
            database: an open, migrated database; the ledger does not close it.
            dead_after_secs: seconds without a commit after which another gateway is declared dead.
        """
        self._database = database
        self._clock = clock
        self._dead_gateway_detector = gateways.DeadGatewayDetector(dead_after_secs)
        self._heartbeat_secs = min(_HEARTBEAT_SECS, dead_after_secs / 4)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Register this gateway in the database and start the background tasks.

        Raises:
            HelexaError: another gateway has exclusive use of the database, the database does not answer, or the
                write-ahead log cannot be used.
        """
        database_path = await self._database.claim()
        self._group_commit = GroupCommit(self._database, self._clock, socket.gethostname(), database_path)
        if database_path is not None:  # no other gateway uses this database
            await catch_up(database_path, self._database)
            # Therefore a registration that is still present was left by a gateway that crashed.
            await gateways.retire_all(self._database, await gateways.present(self._database), self._clock())
        await self._group_commit.join()
        self._tasks = [asyncio.create_task(self._group_commit.run()), asyncio.create_task(self._keep_tidy())]
        if database_path is None:
            watch_loop = repeat(self._watch_gateways, self._heartbeat_secs, "the list of gateways cannot be read")
            self._tasks.append(asyncio.create_task(watch_loop))

    async def close(self) -> None:
        """Write all pending changes to the database and unregister this gateway.

        Reservations that are still open are charged in full. If the database does not answer, the method gives up after
        10 seconds.
        """
        self._group_commit.wake(end=True)
        try:
            async with asyncio.timeout(_CLOSE_SECS):
                # The time limit must not cancel a commit that is running.
                await asyncio.shield(self._tasks[0])
                if not self._group_commit.clean:
                    # This gateway stays registered. When it is retired later, its open reservations are charged.
                    raise DatabaseError("the ledger stopped before it had written all changes; see the gateway's log")
                budgets = self._group_commit.budgets
                await gateways.retire_all(self._database, [(budgets.gateway, budgets.batch)], self._clock())
        except (TimeoutError, DatabaseError) as error:
            log.warning(
                "ledger closed before its last changes were written error=%s; open reservations are charged later",
                quoted(error),
            )
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    @property
    def open(self) -> int:
        """Number of reservations that are neither settled nor released."""
        return len(self._group_commit.budgets.open)

    @property
    def available(self) -> bool:
        """True if the last write to the database succeeded, or if none was tried."""
        return self._group_commit.retry.problem is None

    async def writable(self) -> bool:
        """Return whether the database can be written; False once the ledger is closing."""
        if self._group_commit.ending:
            return False
        try:
            async with asyncio.timeout(_PROBE_SECS):
                return await self._group_commit.probe() is None
        except TimeoutError:
            return False

    async def reserve(self, principal: Principal, request_id: str, model: str, tokens: int) -> Reservation:
        """Reserve tokens of the key's budget.

        When the method returns, the reservation survives a crash. The caller must end it: a reservation that is open
        when the gateway ends is charged in full. Reservations of keys without a cap are recorded too.

        Args:
            request_id: the request's id in the ledger. Two calls with the same id make two reservations.
            tokens: maximum number of tokens that the request may use.

        Raises:
            ApiError: 429 `insufficient_quota` or `rate_limit_exceeded` (with Retry-After) if the budget has too few
                tokens left; 503 if too many requests wait, the database does not answer, or the ledger is closing.
        """
        commits = self._group_commit
        if commits.ending:
            raise shutting_down()
        if commits.retry.problem is not None:
            raise unavailable()
        if len(commits.reservations) >= MAX_WAITING:
            raise overloaded(f"{MAX_WAITING} requests already wait for the ledger; retry in 1 s", retry_after=1)
        request = ReservationRequest(principal, plain(request_id), plain(model), max(1, bounded(tokens)))
        reservation = commits.admit(request)
        if reservation is not None:
            return reservation
        future: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        commits.enqueue(PendingReservation(request, future))
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:  # granted just before the caller was canceled
                future.result().abandon()
            raise

    def record(self, activity: Activity) -> None:
        """Queue a row of the activity log for later; drop it if the queue is full."""
        self._group_commit.record(activity)

    async def flush(self) -> None:
        """Write all pending changes to the database, so that queries include them.

        If the database fails, the method returns without an error.

        If several gateways share the database, the method does nothing. In this case, each reservation is in the
        database before it is granted. Queries may still lack the newest rows of the activity log.
        """
        await self._group_commit.flush()

    async def recent(
        self, limit: int = 100, before: int | None = None, **filters: str | int | None
    ) -> list[dict[str, Any]]:
        """Return the newest activity rows: see `activity_and_usage_totals.recent`."""
        await self.flush()
        return await recent(self._database, limit, before, **filters)

    async def charges(self, days: range, groups: Sequence[str], **filters: str | None) -> list[dict[str, Any]]:
        """Return sums of charged tokens: see `activity_and_usage_totals.charges`."""
        await self.flush()
        return await charges(self._database, days, groups, **filters)

    async def budget(self, principal: Principal) -> Budget:
        """Return the key's tokens in its budget window: spent, and held by leases."""
        await self.flush()
        return await budget(self._database, principal, self._clock())

    async def budgets(self, principals: Iterable[Principal]) -> dict[str, Budget]:
        """Return the result of `budget` for several keys, by key id."""
        await self.flush()
        return await budgets(self._database, principals, self._clock())

    async def check_budget(self, principal: Principal) -> None:
        """Raise an error if the key has spent its whole budget. No tokens are reserved.

        Raises:
            ApiError: 429 `insufficient_quota` or `rate_limit_exceeded`; 503 if the database does not answer.
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
            self._group_commit.wake(tidy=True)

    async def _watch_gateways(self) -> None:
        """Write a heartbeat, and retire gateways that no longer write theirs."""
        self._group_commit.wake(beat=True)
        this_gateway = self._group_commit.budgets.gateway
        other_gateways = [row for row in await gateways.present(self._database) if row[0] != this_gateway]
        dead_gateways = self._dead_gateway_detector.find_dead(other_gateways, time.monotonic())
        await gateways.retire_all(self._database, dead_gateways, self._clock())
