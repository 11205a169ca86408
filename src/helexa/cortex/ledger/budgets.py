"""One gateway's budget state in memory: leases, open reservations, and rows that are not in the database yet.

A lease holds tokens of an API key's budget that the gateway has taken from the database in advance. A change is made in
memory first, and the next batch writes it to the database. Batches are written in order, and each batch exactly once.
"""

from collections.abc import Callable, Sequence

from helexa.cortex.ledger import entries
from helexa.cortex.ledger.gateways import SPEND, LeaseGrant
from helexa.cortex.ledger.lease import IDLE_SECS, UNUSED_SECS, Lease
from helexa.cortex.ledger.reservation import Closing, Reservation, ReservationRequest
from helexa.cortex.ledger.storage.database import Args, Step

_GUARD = "UPDATE gateways SET batch = $2, low = $3 WHERE id = $1 AND batch = $2 - 1"
_UPDATE_LEASE = "UPDATE leases SET granted = $4, spent = $5 WHERE key_id = $1 AND window_id = $2 AND gateway = $3"
_DELETE_LEASE = "DELETE FROM leases WHERE key_id = $1 AND window_id = $2 AND gateway = $3"


class Budgets:
    """Leases and reservations of one gateway.

    Attributes:
        gateway: the gateway's id.
        batch: number of batches that `next_batch` has returned so far.
        leases: leases by (key id, id of the budget window).
        open: reservations that are neither settled nor released, by sequence number, in the order of admission.
    """

    def __init__(self, gateway: int) -> None:
        self.gateway = gateway
        self.batch = 0
        self.leases: dict[tuple[str, int], Lease] = {}
        self.open: dict[int, Reservation] = {}
        self._current: dict[str, Lease] = {}  # by key id: the lease of the key's newest window
        self._seq = 0
        self._changed: set[Lease] = set()
        self._opened: dict[int, Args] = {}  # by seq: rows that are not written yet
        self._rows: dict[str, list[Args]] = {entries.CLOSE: [], SPEND: [], _DELETE_LEASE: []}

    def admit(
        self, request: ReservationRequest, now: float, close: Callable[[Closing], None]
    ) -> tuple[Reservation, entries.Record] | None:
        """Reserve the tokens of `request`, if the key's lease in memory has enough free tokens.

        A lease holds tokens that this gateway has taken in advance from the key's budget.

        Args:
            request: the request's key and the number of tokens.
            now: Unix seconds.
            close: function that the reservation calls when it is settled or released.

        Returns:
            The reservation and its record for the write-ahead log, or None if the free tokens do not suffice.
        """
        principal = request.principal
        lease = self._current.get(principal.key_id)
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
        self._opened[self._seq] = entries.opening(self.gateway, *values)
        return reservation, [entries.OPENED, *values]

    def close(self, closing: Closing, now: float) -> entries.Record:
        """Settle or release one of this gateway's reservations in memory.

        Returns:
            The record of this change for the write-ahead log.
        """
        reservation = closing.reservation
        lease, seq = reservation.lease, reservation.seq
        del self.open[seq]
        before_settling = lease.granted, lease.spent
        lease.settle(reservation.tokens, closing.charged)
        lease.used_at = now
        if (lease.granted, lease.spent) != before_settling:
            self._changed.add(lease)
        columns = (closing.state, *closing.values(now))
        unwritten_row = self._opened.get(seq)
        if unwritten_row is not None:
            self._opened[seq] = entries.closed(unwritten_row, columns)
        else:
            self._rows[entries.CLOSE].append((self.gateway, seq, *columns))
        return [entries.CLOSED, seq, lease.key_id, lease.window_id, lease.spent, *columns]

    def adopt(self, grant: LeaseGrant, now: float) -> None:
        """Update a lease in memory after a transaction in the database has taken the tokens of `grant` for it."""
        lease, principal = grant.lease, grant.principal
        lease.granted, lease.debt, lease.cap = grant.granted, grant.debt, principal.hard_cap
        lease.window, lease.ends_at, lease.used_at = principal.window, grant.ends_at, now
        self.leases[lease.key_id, lease.window_id] = self._current[lease.key_id] = lease

    def tidy(self, now: float) -> None:
        """Give the free tokens of idle leases back to the budgets of their keys, and delete unused leases.

        A lease without reservations is deleted if it was idle for `UNUSED_SECS` or if its budget window has ended. The
        next batch writes these changes to the database.
        """
        for lease in list(self.leases.values()):
            idle = now - lease.used_at
            window_ended = self._current.get(lease.key_id) is not lease or now >= lease.ends_at
            if not lease.reserved and (window_ended or idle >= UNUSED_SECS):
                self._delete_lease(lease)
            elif lease.free and (window_ended or idle >= IDLE_SECS):
                lease.granted -= lease.free
                self._changed.add(lease)

    def next_batch(self, extra_steps: Sequence[Step] = ()) -> tuple[tuple[str, Args], list[Step]]:
        """Return the next batch: its guard statement, and the SQL steps that write all changes since the last batch.

        The guard statement runs first and stores the batch's number in the database. If the number is already stored,
        the guard changes no row, and the steps are not run. A batch that is sent twice is therefore written only once.
        `extra_steps` are appended to the steps.
        """
        self.batch += 1
        lowest_open_seq = next(iter(self.open), self._seq + 1)
        leases = sorted(
            (lease.key_id, lease.window_id, self.gateway, lease.granted, lease.spent) for lease in self._changed
        )
        # All gateways lock rows in this order, which prevents deadlocks.
        self._rows[SPEND] = sorted(self._rows[SPEND], key=tuple)
        steps: list[Step] = [(_UPDATE_LEASE, leases)] if leases else []
        if self._opened:
            steps.append((entries.ADD, list(self._opened.values())))
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
        """Number of reservations that the next batch must insert or update in the database."""
        return len(self._opened) + len(self._rows[entries.CLOSE])

    def _delete_lease(self, lease: Lease) -> None:
        lease_key = (lease.key_id, lease.window_id)
        del self.leases[lease_key]
        if self._current.get(lease.key_id) is lease:
            del self._current[lease.key_id]
        self._changed.discard(lease)
        if lease.spent:
            self._rows[SPEND].append((*lease_key, lease.spent))
        self._rows[_DELETE_LEASE].append((*lease_key, self.gateway))
