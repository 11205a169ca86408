"""Ledgers that run, several on one database if asked for."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from helexa.core.errors import ApiError
from helexa.cortex.access.principal import Principal, Window
from helexa.cortex.ledger import gateways
from helexa.cortex.ledger.ledger import Ledger
from helexa.cortex.ledger.reservation import Reservation
from helexa.cortex.ledger.storage.backends import open_database
from helexa.cortex.ledger.storage.database import Database

BALANCE = Window()
_alive: set[Ledger] = set()


class Clock:
    """Time that passes when told to."""

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
    """Ledgers of so many gateways, each with a database connection of its own; `shared` as if there were others."""
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
            _alive.add(ledger)
            stack.callback(_alive.discard, ledger)
        yield ledgers


def share(database: Database) -> None:
    """Let several gateways work on one SQLite file, as they may on PostgreSQL: the rules between them are the same."""

    async def claim() -> None:
        return None

    database.claim = claim  # type: ignore[method-assign]


async def kill(ledger: Ledger) -> None:
    """Stop as a killed process does: without a word."""
    _alive.discard(ledger)
    if journal := ledger._committer._journal:
        ledger._committer._journal = None
        journal.close()
    for task in ledger._tasks:
        task.cancel()
    await asyncio.wait(ledger._tasks)
    ledger._tasks = [asyncio.create_task(asyncio.sleep(0))]


async def sweep(url: str, count: int | None = None) -> None:
    """Take gateways, the oldest first, for dead."""
    database = await open_database(url)
    await gateways.sweep(database, sorted(await gateways.present(database))[:count], 1_700_000_000.0)
    await database.close()


async def try_reserve(ledger: Ledger, principal: Principal, tokens: int, request: str = "r") -> Reservation | ApiError:
    try:
        return await ledger.reserve(principal, request, "Org/M", tokens)
    except ApiError as error:
        return error


async def rows(url: str, sql: str, *args: Any) -> list[dict[str, Any]]:
    """What the database says once all ledgers that live have written what they gathered."""
    for ledger in list(_alive):
        await ledger.flush()
    database = await open_database(url)
    try:
        return await database.fetch(sql, *args)
    finally:
        await database.close()


async def spent(url: str, key: str = "key") -> int:
    """What the windows and leases of a key say it has spent in all."""
    (row,) = await rows(
        url,
        "SELECT CAST((SELECT COALESCE(SUM(spent), 0) FROM windows WHERE key_id = $1)"
        " + (SELECT COALESCE(SUM(spent), 0) FROM leases WHERE key_id = $1) AS BIGINT) AS tokens",
        key,
    )
    return row["tokens"]


async def charged(url: str, key: str = "key") -> int:
    """What the entries of a key say."""
    (row,) = await rows(
        url, "SELECT CAST(COALESCE(SUM(charged), 0) AS BIGINT) AS tokens FROM entries WHERE key_id = $1", key
    )
    return row["tokens"]


async def states(url: str) -> list[str]:
    return [row["state"] for row in await rows(url, "SELECT state FROM entries ORDER BY gateway, seq")]
