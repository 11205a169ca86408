"""SQL and row formats of the `entries` table, which has one row per reservation."""

from typing import Any, Literal

from helexa.cortex.ledger.storage.database import Args

ADD = (
    "INSERT INTO entries (gateway, seq, request_id, account_id, key_id, window_id, model, reserved, reserved_ms, "
    "state, node, charged, prompt, completion, cached, estimated, closed_ms) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)"
)
CLOSE = (
    "UPDATE entries SET state = $3, node = $4, charged = $5, prompt = $6, completion = $7, cached = $8, "
    "estimated = $9, closed_ms = $10 WHERE gateway = $1 AND seq = $2"
)
OPENED: Literal["opened"] = "opened"
CLOSED: Literal["closed"] = "closed"

Record = list[Any]
"""A line of the write-ahead log, in one of two formats:

* `opened`, seq, request_id, account_id, key_id, window_id, model, reserved, reserved_ms
* `closed`, seq, key_id, window_id, total tokens spent by the lease, then the columns that `CLOSE` sets
"""

_OPEN: Args = ("reserved", None, 0, 0, 0, 0, 0, None)


def opening(gateway: int, *values: Any) -> Args:
    """Return the row of an open reservation, as arguments for the SQL statement in `ADD`.

    `values` are the values of the columns from `seq` to `reserved_ms`.
    """
    return (gateway, *values, *_OPEN)


def closed(row: Args, columns: Args) -> Args:
    """Return the row of a closed reservation, as arguments for the SQL statement in `ADD`.

    This function is for a reservation that ended before the database had a row for it.

    Args:
        row: the row of the open reservation, as returned by `opening`.
        columns: the values of the columns from `state` to `closed_ms`.
    """
    return (*row[: -len(_OPEN)], *columns)
