"""One gateway's budgets in memory: leases, open reservations, unwritten rows.

A lease holds tokens of an API key's budget that the gateway has taken from the database in advance. Reservations and
charges first change the memory of the gateway. A batch is a transaction that writes all changes since the previous
batch to the database. Batches are written in order, and each batch exactly once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from helexa.cortex.access.keys import Principal
from helexa.cortex.ledger.gateways import LATEST_WINDOW, SPEND, LeaseGrant
from helexa.cortex.ledger.leases_windows_and_over_budget import (
    IDLE_SECS,
    UNUSED_SECS,
    Closing,
    Lease,
    Reservation,
    ReservationRequest,
    latest_begin,
)
from helexa.cortex.ledger.storage.database import Args, Database, Step

_BUDGET = """
    SELECT CAST(windows.spent + COALESCE(SUM(leases.spent), 0) AS BIGINT) AS spent,
        CAST(COALESCE(SUM(CASE WHEN granted > leases.spent THEN granted - leases.spent ELSE 0 END), 0) AS BIGINT)
            AS held
    FROM windows LEFT JOIN leases ON leases.key_id = windows.key_id AND leases.window_id = windows.window_id
    WHERE windows.key_id = $1 AND windows.window_id = $2 GROUP BY windows.spent
"""
_BUDGETS = """
    SELECT windows.key_id, windows.window_id,
        CAST(windows.spent + COALESCE(SUM(leases.spent), 0) AS BIGINT) AS spent,
        CAST(COALESCE(SUM(CASE WHEN granted > leases.spent THEN granted - leases.spent ELSE 0 END), 0) AS BIGINT)
            AS held
    FROM windows LEFT JOIN leases ON leases.key_id = windows.key_id AND leases.window_id = windows.window_id
    WHERE windows.window_id = 0
        OR windows.window_id = (
            SELECT MAX(window_id) FROM windows AS newer WHERE newer.key_id = windows.key_id AND newer.window_id <= $1
        )
    GROUP BY windows.key_id, windows.window_id, windows.spent
"""

ADD_ENTRY = (
    "INSERT INTO entries (gateway, seq, request_id, account_id, key_id, window_id, model, reserved, reserved_ms, "
    "state, node, charged, prompt, completion, cached, estimated, closed_ms) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)"
)
CLOSE_ENTRY = (
    "UPDATE entries SET state = $3, node = $4, charged = $5, prompt = $6, completion = $7, cached = $8, "
    "estimated = $9, closed_ms = $10 WHERE gateway = $1 AND seq = $2"
)
OPENED: Literal["opened"] = "opened"
CLOSED: Literal["closed"] = "closed"

Record = list[Any]
"""A record of the write-ahead log: a list. There are two kinds, with these items:

* `opened`, seq, request_id, account_id, key_id, window_id, model, reserved, reserved_ms
* `closed`, seq, key_id, window_id, total tokens spent from the lease, then the columns that `CLOSE_ENTRY` sets
"""

_OPEN: Args = ("reserved", None, 0, 0, 0, 0, 0, None)

_GUARD = "UPDATE gateways SET batch = $2, low = $3 WHERE id = $1 AND batch = $2 - 1"
_UPDATE_LEASE = "UPDATE leases SET granted = $4, spent = $5 WHERE key_id = $1 AND window_id = $2 AND gateway = $3"
_DELETE_LEASE = "DELETE FROM leases WHERE key_id = $1 AND window_id = $2 AND gateway = $3"


def opening(gateway: int, *values: Any) -> Args:
    """Return the arguments of `ADD_ENTRY` for a reservation that has not ended.

    `values` are the values of the columns from `seq` to `reserved_ms`.
    """
    return (gateway, *values, *_OPEN)


def closed(row: Args, columns: Args) -> Args:
    """Return the arguments of `ADD_ENTRY` for a reservation that has already ended.

    Args:
        row: the arguments that `opening` returned for the reservation, and that were not written yet.
        columns: the values of the columns from `state` to `closed_ms`.
    """
    return (*row[: -len(_OPEN)], *columns)


class Budgets:
    """Leases and reservations of one gateway, in memory."""

    def __init__(self, gateway: int) -> None:
        self.gateway = gateway
        self.batch = 0  # number of batches that `next_batch` has returned so far
        self.leases: dict[tuple[str, int], Lease] = {}  # leases by (key id, id of the budget window)
        # reservations that are neither settled nor released, by sequence number, in the order of admission
        self.open: dict[int, Reservation] = {}
        self._current: dict[str, Lease] = {}  # by key id: the lease of the key's newest window
        self._seq = 0
        self._changed: set[Lease] = set()
        self._opened: dict[int, Args] = {}  # unwritten rows of new reservations, by sequence number
        self._rows: dict[str, list[Args]] = {CLOSE_ENTRY: [], SPEND: [], _DELETE_LEASE: []}

    def admit(
        self, request: ReservationRequest, now: float, close: Callable[[Closing], None]
    ) -> tuple[Reservation, Record] | None:
        """Reserve tokens from the key's lease in memory, if the lease has enough.

        Returns:
            The reservation and its record for the write-ahead log, or None if the key has no valid lease with enough
            free tokens. The reservation calls `close` when it is settled or released.
        """
        principal = request.principal
        lease = self._current.get(principal.key_id)
        # Without a valid lease that has enough tokens, the caller must first take tokens from the database.
        if lease is None or not lease.has(principal, request.tokens, now):
            return None
        self._seq += 1
        reservation = Reservation(self.gateway, self._seq, request, lease, close)
        self.open[self._seq] = reservation
        lease.reserved += request.tokens
        lease.used_at = now
        values = (
            self._seq,
            request.request_id,
            principal.account_id,
            principal.key_id,
            lease.window_id,
            request.model,
            request.tokens,
            int(now * 1000),
        )
        self._opened[self._seq] = opening(self.gateway, *values)
        return reservation, [OPENED, *values]

    def close(self, closing: Closing, now: float) -> Record:
        """Settle or release an open reservation in memory; return its write-ahead record."""
        reservation = closing.reservation
        lease, seq = reservation.lease, reservation.seq
        del self.open[seq]
        before_settling = lease.granted, lease.spent
        lease.settle(reservation.tokens, closing.charged)
        lease.used_at = now
        if (lease.granted, lease.spent) != before_settling:
            self._changed.add(lease)
        columns = (closing.state, *closing.values(now))
        # If the reservation's row is not written yet, one INSERT of the final row replaces an INSERT and an UPDATE.
        unwritten_row = self._opened.get(seq)
        if unwritten_row is not None:
            self._opened[seq] = closed(unwritten_row, columns)
        else:
            self._rows[CLOSE_ENTRY].append((self.gateway, seq, *columns))
        # The record holds the lease's total of spent tokens, not the increase, so replaying the record twice after a
        # crash does not charge twice.
        return [CLOSED, seq, lease.key_id, lease.window_id, lease.spent, *columns]

    def adopt(self, grant: LeaseGrant, now: float) -> None:
        """Store the lease of a committed grant, as the current lease of its key."""
        lease, principal = grant.lease, grant.principal
        lease.granted, lease.debt, lease.cap = grant.granted, grant.debt, principal.hard_cap
        lease.window, lease.ends_at, lease.used_at = principal.window, grant.ends_at, now
        self.leases[lease.key_id, lease.window_id] = self._current[lease.key_id] = lease

    def tidy(self, now: float) -> None:
        """Give free tokens of idle leases back to the budgets; delete unused leases.

        A lease without reservations is deleted if it was idle for `UNUSED_SECS` or if its budget window has ended.
        Other leases give their free tokens back if they were idle for `IDLE_SECS` or if their window has ended.
        """
        for lease in list(self.leases.values()):
            idle = now - lease.used_at
            window_ended = self._current.get(lease.key_id) is not lease or now >= lease.ends_at
            if not lease.reserved and (window_ended or idle >= UNUSED_SECS):
                self._delete_lease(lease)
            # The free tokens are given back, because other gateways may need them.
            elif lease.free and (window_ended or idle >= IDLE_SECS):
                lease.granted -= lease.free
                self._changed.add(lease)

    def next_batch(self, extra_steps: Sequence[Step] = ()) -> tuple[tuple[str, Args], list[Step]]:
        """Return the next batch: a guard statement, and the SQL steps with `extra_steps`.

        The batch takes all changes since the previous call, so the caller must write it before the next call. The guard
        statement stores the batch's number in the database. If the number is already stored, the guard changes no row,
        and the database skips the steps. Therefore a batch that is sent twice is written once.
        """
        self.batch += 1
        lowest_open_seq = next(iter(self.open), self._seq + 1)
        leases = sorted(
            (lease.key_id, lease.window_id, self.gateway, lease.granted, lease.spent) for lease in self._changed
        )
        # All gateways lock the rows of windows in the same order (by key and window), which prevents deadlocks.
        self._rows[SPEND] = sorted(self._rows[SPEND], key=tuple)
        steps: list[Step] = [(_UPDATE_LEASE, leases)] if leases else []
        if self._opened:
            steps.append((ADD_ENTRY, list(self._opened.values())))
        steps += [(sql, rows) for sql, rows in self._rows.items() if rows]
        self._opened = {}
        self._rows = {sql: [] for sql in self._rows}
        self._changed = set()
        return (_GUARD, (self.gateway, self.batch, lowest_open_seq)), [*steps, *extra_steps]

    @property
    def written(self) -> bool:
        """True if there are no changes since the last call of `next_batch`."""
        return not (self._changed or self._opened or any(self._rows.values()))

    @property
    def unwritten(self) -> int:
        """Number of reservations that the next batch inserts or updates."""
        return len(self._opened) + len(self._rows[CLOSE_ENTRY])

    def _delete_lease(self, lease: Lease) -> None:
        lease_key = (lease.key_id, lease.window_id)
        del self.leases[lease_key]
        if self._current.get(lease.key_id) is lease:
            del self._current[lease.key_id]
        self._changed.discard(lease)
        # The tokens spent from the lease stay counted: the batch adds them to the budget window.
        if lease.spent:
            self._rows[SPEND].append((*lease_key, lease.spent))
        self._rows[_DELETE_LEASE].append((*lease_key, self.gateway))


@dataclass(frozen=True, slots=True)
class Budget:
    """Used tokens of an API key in its current budget window."""

    spent: int
    held: int  # number of tokens that gateways hold in their leases for running and later requests
    # When the window ends (Unix seconds). None if the key's cap has no time window or no window is running.
    ends_at: float | None


async def budget(database: Database, principal: Principal, now: float) -> Budget:
    """Return the used tokens of the principal's key at the time `now` (Unix seconds)."""
    window_id, ends_at = 0, None
    if principal.window.kind == "rolling":
        window_id = (await database.fetch(LATEST_WINDOW, principal.key_id, latest_begin(now)))[0]["latest"] or 0
        ends_at = window_id + principal.window.seconds
        if now >= ends_at:
            return Budget(0, 0, None)
    rows = await database.fetch(_BUDGET, principal.key_id, window_id)
    return Budget(rows[0]["spent"], rows[0]["held"], ends_at) if rows else Budget(0, 0, ends_at)


async def budgets(database: Database, principals: Iterable[Principal], now: float) -> dict[str, Budget]:
    """Return the used tokens of each key in `principals` by key id, with one query."""
    rows = await database.fetch(_BUDGETS, latest_begin(now))
    used = {(row["key_id"], row["window_id"]): (row["spent"], row["held"]) for row in rows}
    latest: dict[str, int] = {}
    for key_id, window_id in used:
        latest[key_id] = max(latest.get(key_id, 0), window_id)
    found: dict[str, Budget] = {}
    for principal in principals:
        window_id, ends_at = 0, None
        if principal.window.kind == "rolling":
            window_id = latest.get(principal.key_id, 0)
            ends_at = window_id + principal.window.seconds
            if now >= ends_at:
                found[principal.key_id] = Budget(0, 0, None)
                continue
        found[principal.key_id] = Budget(*used.get((principal.key_id, window_id), (0, 0)), ends_at)
    return found
