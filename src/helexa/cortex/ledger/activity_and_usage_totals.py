"""The activity log (one row per finished request), and sums of charged tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

from helexa.cortex.ledger.leases_windows_and_over_budget import bounded
from helexa.cortex.ledger.storage.database import Args, Database, Step, are_plain, plain

MAX_ROWS = 10_000
_TRIM_INTERVAL_ROWS = 500
_MAX_PAGE_ROWS = 1000
_MAX_INTEGER = 1 << 53  # JSON readers keep integers exact up to 2^53; Unix times in milliseconds are smaller

GROUPS = ("day", "hour", "account_id", "key_id", "model")
FILTERS = ("account_id", "key_id", "model")
MAX_CHARGE_ROWS = 50_000

SUMS = ("requests", "prompt", "completion", "cached", "charged", "estimated")

_DAY_MS = 86_400_000
_HOUR_MS = 3_600_000
_CHARGED = "state IN ('settled', 'orphaned')"


@dataclass(slots=True)
class Activity:
    """A row of the activity log: one finished request."""

    request_id: str
    started_ms: int  # start of the request in Unix milliseconds
    api: str
    model: str  # resolved model id
    status: int  # HTTP status of the response; 499 if the client disconnected
    duration_ms: float
    # account and API key of the request; None for anonymous requests
    account_id: str | None = None
    key_id: str | None = None
    alias: str | None = None  # requested model name, if it differs from the model id
    node: str | None = None  # name of the last node that the request was forwarded to; None if it was not forwarded
    route: str | None = None  # why the router chose the node
    error_code: str | None = None  # code of the error response; None if the request succeeded
    prompt: int = 0  # number of prompt tokens, including `cached`
    completion: int = 0
    cached: int = 0  # number of prompt tokens that the node read from its prefix cache
    ttft_ms: float | None = None  # time to first token; None if no token was produced
    waited_ms: float = 0.0  # time between the request's arrival and its forwarding to a node
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
_texts = attrgetter(*(field.name for field in fields(Activity) if field.type in (str, str | None)))
_numbers = attrgetter(*(field.name for field in fields(Activity) if field.type is int))
_FILTERS = ("account_id", "key_id", "model", "node", "status")


class ActivityLog:
    """Queues rows of the activity log, and limits its table to `MAX_ROWS` rows.

    If `MAX_ROWS` rows are already queued, new rows are dropped, and `dropped` counts them.
    """

    def __init__(self) -> None:
        self.dropped = 0  # number of rows that were dropped because the queue was full
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
        """Empty the queue; return the SQL that writes its rows and may trim the table."""
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
        limit: maximum number of rows. Values outside the range from 1 to 1000 are replaced by the nearer end.
        before: return only rows with a smaller `id`; pass the last `id` of the previous page.
        **filters: required values of `account_id`, `key_id`, `model`, `node` or `status`; None disables a filter.

    Raises:
        ValueError: `filters` has a name other than these five.
    """
    if unknown_filters := filters.keys() - set(_FILTERS):
        raise ValueError(f"no such filter: {', '.join(sorted(unknown_filters))}; use {', '.join(_FILTERS)}")
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
    # Fast path: nearly all rows can be stored unchanged, and one check of the whole row is faster than one per value.
    texts, numbers = [*filter(None, _texts(activity))], _numbers(activity)
    if are_plain(texts) and min(numbers) >= 0 and max(numbers) <= _MAX_INTEGER:
        return _values(activity)
    return tuple(
        [
            plain(value)
            if type(value) is str
            else bounded(value, _MAX_INTEGER)
            if type(value) is int and not 0 <= value <= _MAX_INTEGER
            else value
            for value in _values(activity)
        ]
    )


async def charges(
    database: Database, days: range, groups: Sequence[str], **filters: str | None
) -> list[dict[str, Any]]:
    """Return sums of charged tokens by group, sorted by the values of `groups`.

    A row has the values of `groups`, the number of charged requests (`requests`), sums of tokens (`prompt`,
    `completion`, `cached`, `charged`), and the number of requests whose tokens the gateway estimated (`estimated`).
    Groups without charges have no row.
    Once there are more than `MAX_CHARGE_ROWS` rows, the later days are left out.

    Args:
        days: the UTC days to include, in days since 1970-01-01.
        groups: names from `GROUPS`. The value of `hour` is the time at which the hour begins, for example
            `2026-11-28T05:00:00Z`.
        **filters: required values of `account_id`, `key_id` or `model`; None disables a filter.

    Raises:
        ValueError: `groups` or `filters` has an unknown name.
    """
    if unknown := {*groups} - {*GROUPS} | filters.keys() - {*FILTERS}:
        raise ValueError(
            f"unknown groups or filters: {', '.join(sorted(unknown))}; "
            f"use the groups {', '.join(GROUPS)} and the filters {', '.join(FILTERS)}"
        )
    columns = [name for name in groups if name != "day"]
    expressions = [f"reserved_ms / {_HOUR_MS} AS hour" if name == "hour" else name for name in columns]
    wanted = [(name, value) for name, value in filters.items() if value is not None]
    conditions = [f"{name} = ${number}" for number, (name, _) in enumerate(wanted, 3)]
    sums = ["COUNT(*) AS requests", *(f"CAST(SUM({name}) AS BIGINT) AS {name}" for name in SUMS[1:])]
    statement = (
        f"SELECT {', '.join([*expressions, *sums])} FROM entries "
        f"WHERE {' AND '.join(['reserved_ms >= $1', 'reserved_ms < $2', _CHARGED, *conditions])}"
    )
    if columns:
        statement += f" GROUP BY {', '.join(columns)}"
    totals: dict[tuple[str, ...], list[int]] = {}
    for day in days:  # one query per day, so that other queries do not wait for one long query
        bounds = (day * _DAY_MS, (day + 1) * _DAY_MS)
        for row in await database.fetch(statement, *bounds, *(value for _, value in wanted)):
            if row["requests"]:
                group = tuple(_date(day) if name == "day" else _value(row, name) for name in groups)
                total = totals.setdefault(group, [0] * len(SUMS))
                total[:] = (before + row[name] for before, name in zip(total, SUMS, strict=True))
        if len(totals) > MAX_CHARGE_ROWS:
            break
    return [dict(zip((*groups, *SUMS), (*group, *totals[group]), strict=True)) for group in sorted(totals)]


def _value(row: Mapping[str, Any], name: str) -> str:
    """Return a row's value of the group `name`; for `hour`, the start of the hour."""
    if name != "hour":
        return row[name]
    return datetime.fromtimestamp(row["hour"] * _HOUR_MS / 1000, UTC).strftime("%Y-%m-%dT%H:00:00Z")


def _date(day: int) -> str:
    return datetime.fromtimestamp(day * _DAY_MS / 1000, UTC).date().isoformat()
