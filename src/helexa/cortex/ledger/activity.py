"""The activity log: one row per finished request, for users and operators to read."""

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from helexa.cortex.ledger.reservation import bounded, plain
from helexa.cortex.ledger.storage.database import Args, Database, Step

MAX_ROWS = 10_000
_TRIM_INTERVAL_ROWS = 500
_MAX_PAGE_ROWS = 1000
_MAX_INTEGER = 1 << 53  # integers up to here are exact in JSON, and times in milliseconds are smaller


@dataclass(slots=True)
class Activity:
    """One finished request.

    Attributes:
        started_ms: start of the request in Unix milliseconds.
        api: path of the API endpoint.
        model: resolved model id.
        status: HTTP status of the response; 499 if the client disconnected.
        duration_ms: duration of the whole request.
        account_id, key_id: account and API key of the request; None for anonymous requests.
        alias: requested model name, if it differs from the model id.
        node: name of the last node that the request was forwarded to; None if it was not forwarded.
        route: why the router chose the node.
        error_code: code of the error response; None if the request succeeded.
        prompt: number of prompt tokens, including `cached`.
        completion: number of completion tokens.
        cached: number of prompt tokens that the node read from its prefix cache.
        ttft_ms: time to first token; None if no token was produced.
        waited_ms: time between the request's arrival and its forwarding to a node.
        tokens_per_second: decode speed.
        client_gone: True if the client disconnected.
        client: IP address of the client; None if it is unknown.
    """

    request_id: str
    started_ms: int
    api: str
    model: str
    status: int
    duration_ms: float
    account_id: str | None = None
    key_id: str | None = None
    alias: str | None = None
    node: str | None = None
    route: str | None = None
    error_code: str | None = None
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    ttft_ms: float | None = None
    waited_ms: float = 0.0
    tokens_per_second: float | None = None
    client_gone: bool = False
    client: str | None = None


_COLUMNS = tuple(field.name for field in fields(Activity))
_APPEND = (
    f"INSERT INTO activity ({', '.join(_COLUMNS)}) "
    f"VALUES ({', '.join(f'${number}' for number in range(1, len(_COLUMNS) + 1))})"
)
_TRIM = "DELETE FROM activity WHERE id <= (SELECT MAX(id) FROM activity) - $1"
_values = attrgetter(*_COLUMNS)
_FILTERS = ("account_id", "key_id", "model", "node", "status")


class ActivityLog:
    """Queues rows for the database table `activity` and trims the table to the newest `MAX_ROWS` rows.

    If `MAX_ROWS` rows are already queued, new rows are dropped and counted.

    Attributes:
        dropped: number of rows that were dropped because the queue was full.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._pending: list[Activity] = []
        self._since_trim = _TRIM_INTERVAL_ROWS

    def append(self, activity: Activity) -> None:
        """Queue a row, or drop it if the queue is full."""
        if len(self._pending) < MAX_ROWS:
            self._pending.append(activity)
        else:
            self.dropped += 1

    def __len__(self) -> int:
        return len(self._pending)

    def steps(self) -> list[Step]:
        """Empty the queue. Return SQL statements with arguments that write the queued rows to the database."""
        rows, self._pending = [_row(activity) for activity in self._pending], []
        steps: list[Step] = [(_APPEND, rows)] if rows else []
        self._since_trim += len(rows)
        if rows and self._since_trim >= _TRIM_INTERVAL_ROWS:
            self._since_trim = 0
            steps.append((_TRIM, [(MAX_ROWS,)]))
        return steps


async def recent(
    database: Database, limit: int = 100, before: int | None = None, **filters: str | int | None
) -> list[dict[str, Any]]:
    """Return rows of the activity log, newest first.

    Args:
        database: the ledger's database.
        limit: maximum number of rows. Values above 1000 are treated as 1000.
        before: return only rows with a smaller `id`; pass the last `id` of the previous page.
        **filters: required values of `account_id`, `key_id`, `model`, `node` or `status`; None disables a filter.

    Raises:
        ValueError: `filters` has a name other than these five.
    """
    if unknown_filters := filters.keys() - set(_FILTERS):
        raise ValueError(f"no such filter: {', '.join(sorted(unknown_filters))}")
    args: list[str | int] = [min(max(1, limit), _MAX_PAGE_ROWS)]
    conditions: list[str] = []
    for condition, value in [("id <", before), *((f"{name} =", value) for name, value in filters.items())]:
        if value is not None:
            args.append(value)
            conditions.append(f"{condition} ${len(args)}")
    where_clause = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    rows = await database.fetch(f"SELECT * FROM activity {where_clause} ORDER BY id DESC LIMIT $1", *args)
    return [row | {"client_gone": bool(row["client_gone"])} for row in rows]


def _row(activity: Activity) -> Args:
    return tuple([_column(value) for value in _values(activity)])


def _column(value: Any) -> Any:
    value_type = type(value)
    return plain(value) if value_type is str else bounded(value, _MAX_INTEGER) if value_type is int else value
