"""Gateways on one database: how one joins, takes tokens, and is laid to rest when its heart has stopped.

Locks are taken in one order everywhere: a gateway's row, then windows by key.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from helexa.cortex.access.principal import Principal
from helexa.cortex.ledger.lease import Lease, grant, window_at
from helexa.cortex.ledger.reservation import Reservation
from helexa.cortex.ledger.storage.database import Database, Sql

log = logging.getLogger(__name__)

# Adding the balance's row, or writing it as it is, locks the key in both databases.
_LOCK_KEY = (
    "INSERT INTO windows (key_id, window_id, spent) VALUES ($1, 0, 0) "
    "ON CONFLICT (key_id, window_id) DO UPDATE SET spent = windows.spent"
)
LATEST_WINDOW = "SELECT MAX(window_id) AS latest FROM windows WHERE key_id = $1"
_BEGIN_WINDOW = "INSERT INTO windows (key_id, window_id, spent) VALUES ($1, $2, 0) ON CONFLICT DO NOTHING"
_ELSEWHERE = """
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


class Swept(Exception):
    """This gateway was taken for dead: its reservations are orphans and its leases are gone."""


@dataclass(frozen=True)
class Taken:
    """What a gateway got from a window.

    Attributes:
        principal: for whom; its cap and window are those that counted.
        ends_at: when the window ends.
        granted: the lease's new grant.
        available: tokens that were there for the taking; less than none when more than the cap is spent and reserved.
    """

    lease: Lease
    principal: Principal
    ends_at: float
    granted: int
    available: int

    @property
    def debt(self) -> int:
        """Tokens that the lease holds beyond the cap."""
        return max(0, -self.available)


async def join(database: Database, name: str) -> int:
    """Add a gateway; its id is never used again."""
    async with database.transaction() as sql:
        rows = await sql.fetch("INSERT INTO gateways (name, batch, low) VALUES ($1, 0, 0) RETURNING id", name)
    return rows[0]["id"]


async def lock(sql: Sql, gateway: int) -> None:
    """Make sure that this gateway is still one until the transaction ends.

    Raises:
        Swept: it is not.
    """
    if not await sql.execute("UPDATE gateways SET batch = batch WHERE id = $1", gateway):
        raise Swept


async def take(
    sql: Sql,
    gateway: int,
    principal: Principal,
    needs: list[int],
    leases: Mapping[tuple[str, int], Lease],
    now: float,
) -> Taken:
    """Take tokens for what waits and for what will come, as far as the key's cap allows.

    The leases must be as the database knows them: one that is ahead of it could be charged for more than it was granted
    if this gateway died now. They are not changed; the caller does that once the transaction is through.
    """
    key_id, window, cap = principal.key_id, principal.window, principal.hard_cap
    await sql.execute(_LOCK_KEY, key_id)
    window_id = 0
    if window.kind == "rolling":
        latest = (await sql.fetch(LATEST_WINDOW, key_id))[0]["latest"]
        window_id = window_at(window, latest, now)
        if window_id != latest:
            await sql.execute(_BEGIN_WINDOW, key_id, window_id)
    ends_at = window_id + window.seconds if window_id else float("inf")
    known = leases.get((key_id, window_id))
    lease = known or Lease(key_id, window_id, window, ends_at, cap)
    available = granted = 0
    if cap is not None:
        elsewhere = (await sql.fetch(_ELSEWHERE, key_id, window_id, gateway))[0]["tokens"]
        available = cap - elsewhere - lease.spent - lease.reserved
        granted = lease.spent + lease.reserved + grant(available, needs)
    if known is None or granted != lease.granted:
        await sql.execute(_WRITE_LEASE, key_id, window_id, gateway, granted, lease.spent)
    return Taken(lease, principal, ends_at, granted, available)


async def retire(sql: Sql, gateway: int, batch: int, now: float) -> bool:
    """End a gateway whose last commit was `batch`: what it had reserved is charged in full, its leases return.

    Returns:
        False, with nothing done, when it has committed since, or is gone.
    """
    rows = await sql.fetch(
        "UPDATE gateways SET batch = batch WHERE id = $1 AND batch = $2 RETURNING low", gateway, batch
    )
    if not rows:
        return False
    spent: Counter[tuple[str, int]] = Counter()
    for entry in await sql.fetch(_ORPHAN, gateway, rows[0]["low"], int(now * 1000)):
        spent[entry["key_id"], entry["window_id"]] += entry["charged"]
    for lease in await sql.fetch("SELECT key_id, window_id, spent FROM leases WHERE gateway = $1", gateway):
        spent[lease["key_id"], lease["window_id"]] += lease["spent"]
    for (key_id, window_id), tokens in sorted(spent.items()):
        await sql.execute(SPEND, key_id, window_id, tokens)
    await sql.execute("DELETE FROM leases WHERE gateway = $1", gateway)
    await sql.execute("DELETE FROM gateways WHERE id = $1", gateway)
    return True


async def present(database: Database) -> list[tuple[int, int]]:
    """The id and last commit of every gateway."""
    return [(row["id"], row["batch"]) for row in await database.fetch("SELECT id, batch FROM gateways")]


async def sweep(database: Database, gone: Iterable[tuple[int, int]], now: float) -> None:
    """Retire gateways, each by its id and last commit."""
    for gateway, batch in gone:
        async with database.transaction() as sql:
            if await retire(sql, gateway, batch, now):
                log.info("gateway %d has left the ledger; what it had reserved is closed", gateway)


async def amend(sql: Sql, reservation: Reservation, state: str, values: tuple[object, ...]) -> None:
    """Close an orphan as it should have been: it lived longer than its gateway's id.

    Args:
        sql: a transaction.
        reservation: what became an orphan.
        state: `settled` or `released`.
        values: node, charged, prompt, completion, cached, estimated, closed_ms.
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


class Watch:
    """Notices gateways whose heart has stopped, by this gateway's clock alone: no two clocks are compared."""

    def __init__(self, dead_after_secs: float) -> None:
        self._dead_after_secs = dead_after_secs
        self._seen: dict[int, tuple[int, float]] = {}
        self._looked = float("-inf")

    def dead(self, gateways: list[tuple[int, int]], now: float) -> list[tuple[int, int]]:
        """The id and last commit of each gateway that has not committed for too long.

        Args:
            gateways: id and last commit of all others.
            now: seconds of a monotonic clock.
        """
        if now - self._looked >= self._dead_after_secs:
            self._seen = {}  # it was we who were away; so may the others have been
        self._looked = now
        seen: dict[int, tuple[int, float]] = {}
        for id, batch in gateways:
            last, since = self._seen.get(id, (batch, now))
            seen[id] = (batch, since if batch == last else now)
        self._seen = seen
        return [(id, batch) for id, (batch, since) in seen.items() if now - since >= self._dead_after_secs]
