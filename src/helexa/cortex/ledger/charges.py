"""Sums of the tokens that requests were charged, by day, account, key and model."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from helexa.cortex.ledger.storage.database import Database

GROUPS = ("day", "account_id", "key_id", "model")
FILTERS = ("account_id", "key_id", "model")
MAX_ROWS = 50_000

_DAY_MS = 86_400_000
_EXPRESSIONS = {"day": f"reserved_ms / {_DAY_MS}"}
_SUMS = ("prompt", "completion", "cached", "charged", "estimated")


async def charges(
    database: Database, since_day: int, groups: Sequence[str], **filters: str | None
) -> list[dict[str, Any]]:
    """Return sums of charges in ascending order, at most `MAX_ROWS` + 1 rows.

    A row has the values of `groups`, the number of charged requests (`requests`), sums of tokens (`prompt`,
    `completion`, `cached`, `charged`), and the number of requests whose charge is `estimated`. Running requests, and
    requests that were not charged, are not included. Days are UTC dates.

    Args:
        database: the ledger's database.
        since_day: first day to include, in days since 1970-01-01.
        groups: names out of `GROUPS`: the sums are separate for each combination of values.
        **filters: required values of `account_id`, `key_id` or `model`; None disables a filter.

    Raises:
        ValueError: `groups` or `filters` has an unknown name.
    """
    if unknown := {*groups} - {*GROUPS} | filters.keys() - {*FILTERS}:
        raise ValueError(f"unknown names: {', '.join(sorted(unknown))}")
    args: list[str | int] = [since_day * _DAY_MS]
    conditions = ["reserved_ms >= $1", "state IN ('settled', 'orphaned')"]
    for name, value in filters.items():
        if value is not None:
            args.append(value)
            conditions.append(f"{name} = ${len(args)}")
    columns = [f"{_EXPRESSIONS.get(name, name)} AS {name}" for name in groups]
    sums = ["COUNT(*) AS requests", *(f"CAST(SUM({name}) AS BIGINT) AS {name}" for name in _SUMS)]
    positions = ", ".join(str(position) for position in range(1, len(groups) + 1))
    grouping = f"GROUP BY {positions} ORDER BY {positions}" if groups else ""
    rows = await database.fetch(
        f"SELECT {', '.join([*columns, *sums])} FROM entries WHERE {' AND '.join(conditions)} {grouping} "
        f"LIMIT {MAX_ROWS + 1}",
        *args,
    )
    return [row | {"day": _date(row["day"])} if "day" in row else row for row in rows if row["requests"]]


def _date(day: int) -> str:
    return datetime.fromtimestamp(day * _DAY_MS / 1000, UTC).date().isoformat()
