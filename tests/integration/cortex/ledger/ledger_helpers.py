"""Helpers: running ledgers, optionally several on one database, and queries of their tables."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from helexa.core.errors import ApiError
from helexa.cortex.access.keys import Principal, Window
from helexa.cortex.ledger import gateways
from helexa.cortex.ledger.leases_windows_and_over_budget import Reservation
from helexa.cortex.ledger.ledger import Ledger
from helexa.cortex.ledger.storage import open_database
from helexa.cortex.ledger.storage.database import Database

BALANCE = Window()
_running_ledgers: set[Ledger] = set()


class Clock:
    """A clock that advances only when a test sets `now`."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def holder(cap: int | None = 100, key: str = "key", window: Window = BALANCE) -> Principal:
    return Principal("account", key, hard_cap=cap, window=window)


@asynccontextmanager
async def running(
    url: str,
    count: int = 1,
    clock: Callable[[], float] | None = None,
    dead_after_secs: float = 15.0,
    shared: bool = False,
) -> AsyncIterator[list[Ledger]]:
    """Run the ledgers of `count` gateways, each with its own connection; `shared` allows more on the database."""
    async with AsyncExitStack() as stack:
        ledgers: list[Ledger] = []
        for _ in range(count):
            database = await open_database(url)
            stack.push_async_callback(database.close)
            await database.migrate()
            if count > 1 or shared:
                share(database)
            ledger = Ledger(database, dead_after_secs=dead_after_secs, **({"clock": clock} if clock else {}))
            await ledger.start()
            stack.push_async_callback(ledger.close)
            ledgers.append(ledger)
            _running_ledgers.add(ledger)
            stack.callback(_running_ledgers.discard, ledger)
        yield ledgers


def share(database: Database) -> None:
    """Let several gateways use one SQLite file, to test on SQLite the rules that apply on PostgreSQL."""

    async def claim() -> None:
        return None

    database.claim = claim  # type: ignore[method-assign]


async def kill(ledger: Ledger) -> None:
    """Stop `ledger` without a shutdown, as a killed process does."""
    _running_ledgers.discard(ledger)
    if journal := ledger._group_commit._wal:
        ledger._group_commit._wal = None
        journal.close()
    for task in ledger._tasks:
        task.cancel()
    await asyncio.wait(ledger._tasks)
    ledger._tasks = [asyncio.create_task(asyncio.sleep(0))]


async def retire_gateways(url: str, count: int | None = None) -> None:
    """Mark the `count` oldest gateways, or all, as dead and settle their reservations."""
    database = await open_database(url)
    await gateways.retire_all(database, sorted(await gateways.present(database))[:count], 1_700_000_000.0)
    await database.close()


async def try_reserve(ledger: Ledger, principal: Principal, tokens: int, request: str = "r") -> Reservation | ApiError:
    try:
        return await ledger.reserve(principal, request, "Org/M", tokens)
    except ApiError as error:
        return error


async def rows(url: str, sql: str, *args: Any) -> list[dict[str, Any]]:
    """Return the rows of a query after all running ledgers have flushed."""
    for ledger in list(_running_ledgers):
        await ledger.flush()
    database = await open_database(url)
    try:
        return await database.fetch(sql, *args)
    finally:
        await database.close()


async def spent(url: str, key: str = "key") -> int:
    """Return the tokens spent by a key, as the sum over its windows and leases."""
    (row,) = await rows(
        url,
        "SELECT CAST((SELECT COALESCE(SUM(spent), 0) FROM windows WHERE key_id = $1)"
        " + (SELECT COALESCE(SUM(spent), 0) FROM leases WHERE key_id = $1) AS BIGINT) AS tokens",
        key,
    )
    return row["tokens"]


async def charged(url: str, key: str = "key") -> int:
    """Return the tokens charged to a key, as the sum over its entries."""
    (row,) = await rows(
        url, "SELECT CAST(COALESCE(SUM(charged), 0) AS BIGINT) AS tokens FROM entries WHERE key_id = $1", key
    )
    return row["tokens"]


async def states(url: str) -> list[str]:
    return [row["state"] for row in await rows(url, "SELECT state FROM entries ORDER BY gateway, seq")]
