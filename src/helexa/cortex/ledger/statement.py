"""Reads from the database how many tokens of its budget an API key has used."""

from collections.abc import Iterable
from dataclasses import dataclass

from helexa.cortex.access.principal import Principal
from helexa.cortex.ledger.gateways import LATEST_WINDOW
from helexa.cortex.ledger.storage.database import Database

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
        OR windows.window_id = (SELECT MAX(window_id) FROM windows AS newer WHERE newer.key_id = windows.key_id)
    GROUP BY windows.key_id, windows.window_id, windows.spent
"""


@dataclass(frozen=True, slots=True)
class Budget:
    """Used tokens of an API key in its current budget window.

    Attributes:
        spent: number of charged tokens.
        held: number of tokens that gateways hold in their leases for running and later requests.
        ends_at: when the window ends (Unix seconds). None if the key's cap has no time window or no window is running.
    """

    spent: int
    held: int
    ends_at: float | None


async def budget(database: Database, principal: Principal, now: float) -> Budget:
    """Return the used tokens of the principal's key at the time `now` (Unix seconds)."""
    window_id, ends_at = 0, None
    if principal.window.kind == "rolling":
        window_id = (await database.fetch(LATEST_WINDOW, principal.key_id))[0]["latest"] or 0
        ends_at = window_id + principal.window.seconds
        if now >= ends_at:
            return Budget(0, 0, None)
    rows = await database.fetch(_BUDGET, principal.key_id, window_id)
    return Budget(rows[0]["spent"], rows[0]["held"], ends_at) if rows else Budget(0, 0, ends_at)


async def budgets(database: Database, principals: Iterable[Principal], now: float) -> dict[str, Budget]:
    """Return the used tokens of several keys at the time `now` (Unix seconds), by key id, with one query."""
    rows = await database.fetch(_BUDGETS)
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
