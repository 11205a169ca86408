"""The newest requests, for people to look at: who asked for what, where it went and how it ended."""

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from helexa.cortex.ledger.reservation import bounded, plain
from helexa.cortex.ledger.storage.database import Args, Database, Step

KEPT = 10_000
_TRIMMED_EVERY = 500
_MOST_SHOWN = 1000
_MOST = 1 << 53  # a time in milliseconds fits, and so does what JSON can carry exactly


@dataclass(slots=True)
class Activity:
    """One request that ended.

    Attributes:
        started_ms: Unix milliseconds.
        account_id, key_id: who asked; None for anonymous requests.
        api: the path it came by.
        alias: the name it asked for, where that is not the model's.
        route: why it went to this node.
        status: HTTP status of the answer; 499 if the client hung up.
        prompt, completion, cached: tokens.
        ttft_ms, duration_ms, waited_ms: time to the first token, of the whole, and until a node was asked.
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


_COLUMNS = tuple(field.name for field in fields(Activity))
_APPEND = (
    f"INSERT INTO activity ({', '.join(_COLUMNS)}) "
    f"VALUES ({', '.join(f'${number}' for number in range(1, len(_COLUMNS) + 1))})"
)
_TRIM = "DELETE FROM activity WHERE id <= (SELECT MAX(id) FROM activity) - $1"
_values = attrgetter(*_COLUMNS)
_FILTERS = ("account_id", "key_id", "model", "node", "status")


class ActivityLog:
    """Rows on their way to the table, which keeps the newest. One that falls behind drops the newest and counts them.

    Attributes:
        dropped: rows that were never written.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._pending: list[Activity] = []
        self._since_trim = _TRIMMED_EVERY

    def append(self, activity: Activity) -> None:
        """Write it with the next batch."""
        if len(self._pending) < KEPT:
            self._pending.append(activity)
        else:
            self.dropped += 1

    def __len__(self) -> int:
        return len(self._pending)

    def steps(self) -> list[Step]:
        """What writes all rows that wait; they are taken out."""
        rows, self._pending = [_row(activity) for activity in self._pending], []
        steps: list[Step] = [(_APPEND, rows)] if rows else []
        self._since_trim += len(rows)
        if rows and self._since_trim >= _TRIMMED_EVERY:
            self._since_trim = 0
            steps.append((_TRIM, [(KEPT,)]))
        return steps


async def recent(
    database: Database, limit: int = 100, before: int | None = None, **filters: str | int | None
) -> list[dict[str, Any]]:
    """The newest requests first.

    Args:
        database: where they are.
        limit: how many, 1000 at most.
        before: only rows with a smaller `id`: the last one of the page before.
        **filters: `account_id`, `key_id`, `model`, `node` or `status` that a row must have; None is no filter.
    """
    if unknown := filters.keys() - set(_FILTERS):
        raise ValueError(f"no such filter: {', '.join(sorted(unknown))}")
    args: list[str | int] = [min(max(1, limit), _MOST_SHOWN)]
    conditions: list[str] = []
    for condition, value in [("id <", before), *((f"{name} =", value) for name, value in filters.items())]:
        if value is not None:
            args.append(value)
            conditions.append(f"{condition} ${len(args)}")
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    rows = await database.fetch(f"SELECT * FROM activity {where} ORDER BY id DESC LIMIT $1", *args)
    return [row | {"client_gone": bool(row["client_gone"])} for row in rows]


def _row(activity: Activity) -> Args:
    return tuple([_column(value) for value in _values(activity)])


def _column(value: Any) -> Any:
    kind = type(value)
    return plain(value) if kind is str else bounded(value, _MOST) if kind is int else value
