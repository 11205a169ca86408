"""What was spent: by day, account, key and model."""

from dataclasses import dataclass
from datetime import date, timedelta

from helexa.cortex.access.principal import Principal
from helexa.cortex.ledger.database import Database
from helexa.cortex.ledger.gateways import LATEST_WINDOW

_EPOCH = date(1970, 1, 1)
_DAY_MS = 86_400_000
_SPEND = f"""
    SELECT reserved_ms / {_DAY_MS} AS day, account_id, key_id, model, COUNT(*) AS requests,
        CAST(SUM(prompt) AS BIGINT) AS prompt, CAST(SUM(completion) AS BIGINT) AS completion,
        CAST(SUM(cached) AS BIGINT) AS cached, CAST(SUM(charged) AS BIGINT) AS charged
    FROM entries
    WHERE reserved_ms >= $1 AND reserved_ms < $2 AND state IN ('settled', 'orphaned')
        AND (CAST($3 AS TEXT) IS NULL OR account_id = $3)
    GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
"""
_BUDGET = """
    SELECT CAST(windows.spent + COALESCE(SUM(leases.spent), 0) AS BIGINT) AS spent,
        CAST(COALESCE(SUM(CASE WHEN granted > leases.spent THEN granted - leases.spent ELSE 0 END), 0) AS BIGINT)
            AS held
    FROM windows LEFT JOIN leases ON leases.key_id = windows.key_id AND leases.window_id = windows.window_id
    WHERE windows.key_id = $1 AND windows.window_id = $2 GROUP BY windows.spent
"""


@dataclass(frozen=True, slots=True)
class Spend:
    """Finished requests of one day (UTC, by when they began), account, key and model.

    Attributes:
        charged: tokens paid: prompt and completion, or for a request that its gateway did not survive what it reserved.
    """

    day: date
    account_id: str
    key_id: str
    model: str
    requests: int
    prompt: int
    completion: int
    cached: int
    charged: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Where a key stands in its window.

    Attributes:
        spent: tokens paid.
        held: tokens that gateways hold for requests under way and to come.
        ends_at: when the window ends (Unix seconds); None for a balance, and while no window has begun.
    """

    spent: int
    held: int
    ends_at: float | None


async def spend(database: Database, since: date, until: date, account_id: str | None = None) -> list[Spend]:
    """What was spent on the days from `since` to `until`, both included; of one account, or of all."""
    first = (since - _EPOCH).days * _DAY_MS
    end = (until - _EPOCH).days * _DAY_MS + _DAY_MS
    rows = await database.fetch(_SPEND, first, end, account_id)
    return [Spend(day=_EPOCH + timedelta(days=row.pop("day")), **row) for row in rows]


async def budget(database: Database, principal: Principal, now: float) -> Budget:
    """Where the key stands now (Unix seconds)."""
    window_id, ends_at = 0, None
    if principal.window.kind == "rolling":
        window_id = (await database.fetch(LATEST_WINDOW, principal.key_id))[0]["latest"] or 0
        ends_at = window_id + principal.window.seconds
        if now >= ends_at:
            return Budget(0, 0, None)
    rows = await database.fetch(_BUDGET, principal.key_id, window_id)
    return Budget(rows[0]["spent"], rows[0]["held"], ends_at) if rows else Budget(0, 0, ends_at)
