"""Sums of the tokens that requests were charged, by day, account, key and model."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from helexa.cortex.ledger.storage.database import Database

GROUPS = ("day", "account_id", "key_id", "model")
FILTERS = ("account_id", "key_id", "model")
MAX_ROWS = 50_000

SUMS = ("requests", "prompt", "completion", "cached", "charged", "estimated")

_DAY_MS = 86_400_000
_CHARGED = "state IN ('settled', 'orphaned')"


async def charges(
    database: Database, days: range, groups: Sequence[str], **filters: str | None
) -> list[dict[str, Any]]:
    """Return sums of charges in ascending order of `groups`. If there are more than `MAX_ROWS` rows, stop early.

    A row has the values of `groups`, the number of charged requests (`requests`), sums of tokens (`prompt`,
    `completion`, `cached`, `charged`), and the number of requests whose charge is `estimated`. Running requests, and
    requests that were not charged, are not included.

    Args:
        database: the ledger's database.
        days: the UTC days to include, in days since 1970-01-01.
        groups: names out of `GROUPS`: the sums are separate for each combination of values.
        **filters: required values of `account_id`, `key_id` or `model`; None disables a filter.

    Raises:
        ValueError: `groups` or `filters` has an unknown name.
    """
    if unknown := {*groups} - {*GROUPS} | filters.keys() - {*FILTERS}:
        raise ValueError(f"unknown names: {', '.join(sorted(unknown))}")
    columns = [name for name in groups if name != "day"]
    wanted = [(name, value) for name, value in filters.items() if value is not None]
    conditions = [f"{name} = ${number}" for number, (name, _) in enumerate(wanted, 3)]
    sums = ["COUNT(*) AS requests", *(f"CAST(SUM({name}) AS BIGINT) AS {name}" for name in SUMS[1:])]
    statement = (
        f"SELECT {', '.join([*columns, *sums])} FROM entries "
        f"WHERE {' AND '.join(['reserved_ms >= $1', 'reserved_ms < $2', _CHARGED, *conditions])}"
    )
    if columns:
        statement += f" GROUP BY {', '.join(columns)}"
    totals: dict[tuple[str, ...], list[int]] = {}
    for day in days:  # one query per day, so that other queries need not wait for a long one
        bounds = (day * _DAY_MS, (day + 1) * _DAY_MS)
        for row in await database.fetch(statement, *bounds, *(value for _, value in wanted)):
            if row["requests"]:
                group = tuple(_date(day) if name == "day" else row[name] for name in groups)
                total = totals.setdefault(group, [0] * len(SUMS))
                total[:] = (before + row[name] for before, name in zip(total, SUMS, strict=True))
        if len(totals) > MAX_ROWS:
            break
    return [dict(zip((*groups, *SUMS), (*group, *totals[group]), strict=True)) for group in sorted(totals)]


def _date(day: int) -> str:
    return datetime.fromtimestamp(day * _DAY_MS / 1000, UTC).date().isoformat()
