"""Gateways that share a database: registration, leases, and retirement.

A lease holds tokens that one gateway has taken in advance from a key's budget window. To prevent deadlocks, all
transactions lock rows in the same order: first the row of the gateway, then the rows of windows, sorted by key.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from helexa.cortex.access.keys import Principal
from helexa.cortex.ledger.leases_windows_and_over_budget import (
    Lease,
    Reservation,
    ReservationRequest,
    grant,
    latest_begin,
    window_at,
)
from helexa.cortex.ledger.storage.database import Database, Sql

log = logging.getLogger(__name__)

# Locks a key until the transaction ends, in SQLite and in PostgreSQL. The statement inserts the key's row for window 0,
# or updates this row without a change.
_LOCK_KEY = (
    "INSERT INTO windows (key_id, window_id, spent) VALUES ($1, 0, 0) "
    "ON CONFLICT (key_id, window_id) DO UPDATE SET spent = windows.spent"
)
LATEST_WINDOW = "SELECT MAX(window_id) AS latest FROM windows WHERE key_id = $1 AND window_id <= $2"
_BEGIN_WINDOW = "INSERT INTO windows (key_id, window_id, spent) VALUES ($1, $2, 0) ON CONFLICT DO NOTHING"
_TOKENS_OF_OTHER_GATEWAYS = """
    SELECT windows.spent + CAST(COALESCE((
        SELECT SUM(CASE WHEN granted > leases.spent THEN granted ELSE leases.spent END)
        FROM leases WHERE key_id = $1 AND window_id = $2 AND gateway <> $3
    ), 0) AS BIGINT) AS tokens
    FROM windows WHERE key_id = $1 AND window_id = $2
"""
_WRITE_LEASE = (
    "INSERT INTO leases (key_id, window_id, gateway, granted, spent) VALUES ($1, $2, $3, $4, $5) "
    "ON CONFLICT (key_id, window_id, gateway) DO UPDATE SET granted = excluded.granted, spent = excluded.spent"
)
_ORPHAN = (
    "UPDATE entries SET state = 'orphaned', charged = reserved, closed_ms = $3 "
    "WHERE gateway = $1 AND seq >= $2 AND state = 'reserved' RETURNING key_id, window_id, charged"
)
SPEND = "UPDATE windows SET spent = spent + $3 WHERE key_id = $1 AND window_id = $2"


class GatewayRetired(Exception):
    """Another gateway has declared this gateway dead and removed its registration.

    The open reservations of a retired gateway are orphaned (charged in full), and its leases are deleted.
    """


@dataclass(frozen=True)
class LeaseGrant:
    """Result of taking tokens from a key's budget window for this gateway's lease."""

    lease: Lease  # the lease that the tokens belong to. Its attributes are not changed yet.
    principal: Principal  # account and key of the lease, with the token cap and the kind of window that were applied
    ends_at: float  # when the window ends (Unix seconds); infinity if the cap has no time window
    granted: int  # the lease's new total of granted tokens; 0 without a cap
    # Tokens that are left for new reservations of this gateway. These are the cap, minus the tokens of other leases,
    # minus the spent and reserved tokens of this lease. Negative if the cap is exceeded; 0 without a cap.
    available: int

    @property
    def debt(self) -> int:
        """Tokens by which spent and reserved tokens exceed the cap, or 0."""
        return max(0, -self.available)


async def join(database: Database, name: str) -> int:
    """Register a gateway and return its id. Ids are never reused."""
    async with database.transaction() as sql:
        rows = await sql.fetch("INSERT INTO gateways (name, batch, low) VALUES ($1, 0, 0) RETURNING id", name)
    return rows[0]["id"]


async def lock(sql: Sql, gateway: int) -> None:
    """Lock the gateway's row in the database until the transaction ends.

    Raises:
        GatewayRetired: another gateway has retired this gateway and deleted its row.
    """
    if not await sql.execute("UPDATE gateways SET batch = batch WHERE id = $1", gateway):
        raise GatewayRetired


async def take_all(
    database: Database,
    gateway: int,
    requests: Iterable[Sequence[ReservationRequest]],
    leases: Mapping[tuple[str, int], Lease],
    now: float,
) -> list[LeaseGrant]:
    """Take tokens for the leases of several keys, in one transaction.

    Args:
        requests: for each key, its requested reservations, at least one. The keys must be sorted by id.
        leases: this gateway's leases, by (key id, window id).

    Returns:
        One grant per key, in the order of `requests`. A grant may cover only some reservations of its key, or none.

    Raises:
        GatewayRetired: another gateway has retired this gateway.
    """
    async with database.transaction() as sql:
        await lock(sql, gateway)
        return [
            await take(
                sql, gateway, key_requests[0].principal, [request.tokens for request in key_requests], leases, now
            )
            for key_requests in requests
        ]


async def take(
    sql: Sql,
    gateway: int,
    principal: Principal,
    requested: list[int],
    leases: Mapping[tuple[str, int], Lease],
    now: float,
) -> LeaseGrant:
    """Take tokens from a key's budget window for this gateway's lease.

    The tokens are for the waiting reservations that fit (see `grant`), plus an advance for later reservations. The
    caller applies the result to `leases` after the commit.

    Before the call, the caller must `lock` the gateway in this transaction. The database must contain all changes of
    the leases in memory. Otherwise, the key could be charged more tokens than it was granted if this gateway crashed
    after the commit.

    Args:
        requested: tokens of each waiting reservation, in order.
        leases: this gateway's leases, by (key id, window id).
    """
    key_id, window, cap = principal.key_id, principal.window, principal.hard_cap
    await sql.execute(_LOCK_KEY, key_id)
    window_id = 0
    if window.kind == "rolling":
        latest_window = (await sql.fetch(LATEST_WINDOW, key_id, latest_begin(now)))[0]["latest"]
        window_id = window_at(window, latest_window, now)
        if window_id != latest_window:
            await sql.execute(_BEGIN_WINDOW, key_id, window_id)
    ends_at = window_id + window.seconds if window_id else float("inf")
    existing_lease = leases.get((key_id, window_id))
    lease = existing_lease or Lease(key_id, window_id, window, ends_at, cap)
    available = granted = 0
    if cap is not None:
        tokens_of_others = (await sql.fetch(_TOKENS_OF_OTHER_GATEWAYS, key_id, window_id, gateway))[0]["tokens"]
        available = cap - tokens_of_others - lease.spent - lease.reserved
        granted = lease.spent + lease.reserved + grant(available, requested)
    if existing_lease is None or granted != lease.granted:
        await sql.execute(_WRITE_LEASE, key_id, window_id, gateway, granted, lease.spent)
    return LeaseGrant(lease, principal, ends_at, granted, available)


async def retire(sql: Sql, gateway: int, batch: int, now: float) -> int | None:
    """Retire a gateway: charge its open reservations in full, and delete it.

    Returns:
        The number of open reservations. None if the gateway has committed a batch after `batch` or is already retired.
    """
    rows = await sql.fetch(
        "UPDATE gateways SET batch = batch WHERE id = $1 AND batch = $2 RETURNING low", gateway, batch
    )
    if not rows:
        return None
    spent_by_window: Counter[tuple[str, int]] = Counter()
    orphans = await sql.fetch(_ORPHAN, gateway, rows[0]["low"], int(now * 1000))
    for entry in orphans:
        spent_by_window[entry["key_id"], entry["window_id"]] += entry["charged"]
    for lease in await sql.fetch("SELECT key_id, window_id, spent FROM leases WHERE gateway = $1", gateway):
        spent_by_window[lease["key_id"], lease["window_id"]] += lease["spent"]
    for (key_id, window_id), tokens in sorted(spent_by_window.items()):
        await sql.execute(SPEND, key_id, window_id, tokens)
    await sql.execute("DELETE FROM leases WHERE gateway = $1", gateway)
    await sql.execute("DELETE FROM gateways WHERE id = $1", gateway)
    return len(orphans)


async def present(database: Database) -> list[tuple[int, int]]:
    """Return the id and the last committed batch of each registered gateway."""
    return [(row["id"], row["batch"]) for row in await database.fetch("SELECT id, batch FROM gateways")]


async def retire_all(database: Database, registrations: Iterable[tuple[int, int]], now: float) -> None:
    """Retire the gateways (id, last batch) that have committed no later batch."""
    for gateway, batch in registrations:
        async with database.transaction() as sql:
            count = await retire(sql, gateway, batch, now)
        if count:
            log.warning(
                "gateway ended with open reservations gateway=%d reservations=%d; their tokens are charged in full",
                *(gateway, count),
            )


async def amend(sql: Sql, reservation: Reservation, state: str, values: tuple[object, ...]) -> None:
    """Correct the charge of a reservation that ended after its gateway's retirement.

    The reservation was charged in full. Its row and the window's spent tokens are corrected to the real charge. If the
    reservation is not orphaned, nothing changes.

    Args:
        state: the new state of the row, `settled` or `released`.
        values: the new values of the columns node, charged, prompt, completion, cached, estimated and closed_ms.
    """
    rows = await sql.fetch(
        "UPDATE entries SET state = $3, node = $4, charged = $5, prompt = $6, completion = $7, cached = $8, "
        "estimated = $9, closed_ms = $10 WHERE gateway = $1 AND seq = $2 AND state = 'orphaned' "
        "RETURNING key_id, window_id, charged - reserved AS difference",
        reservation.gateway,
        reservation.seq,
        state,
        *values,
    )
    for row in rows:
        await sql.execute(SPEND, row["key_id"], row["window_id"], row["difference"])


class DeadGatewayDetector:
    """Detects other gateways that no longer commit batches."""

    # Only this gateway's clock counts, so the clocks of different machines need not agree.
    def __init__(self, dead_after_secs: float) -> None:
        self._dead_after_secs = dead_after_secs
        self._last_batches: dict[int, tuple[int, float]] = {}
        self._last_check = float("-inf")

    def find_dead(self, gateways: list[tuple[int, int]], now: float) -> list[tuple[int, int]]:
        """Return the gateways whose batch number has not changed for `dead_after_secs`.

        The time begins at the first call with this number, and again if there was no call for `dead_after_secs`.

        Args:
            gateways: pairs (id, number of the last committed batch) of all other gateways.
            now: seconds of a monotonic clock.
        """
        if now - self._last_check >= self._dead_after_secs:
            self._last_batches = {}  # this gateway was suspended, and the others may have been, too
        self._last_check = now
        last_batches: dict[int, tuple[int, float]] = {}
        for id, batch in gateways:
            last_batch, since = self._last_batches.get(id, (batch, now))
            last_batches[id] = (batch, since if batch == last_batch else now)
        self._last_batches = last_batches
        return [(id, batch) for id, (batch, since) in last_batches.items() if now - since >= self._dead_after_secs]
