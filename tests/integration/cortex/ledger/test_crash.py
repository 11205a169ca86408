"""Gateways killed at random moments: caps hold, and each finished settlement is in the ledger."""

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cortex.ledger import crash_victim
from cortex.ledger.ledger_helpers import charged, holder, kill, retire_gateways, rows, running, spent, try_reserve
from cortex.running_gateway import eventually
from helexa.core.errors import ApiError
from helexa.cortex.access.keys import Principal
from helexa.cortex.ledger.leases_windows_and_over_budget import Reservation
from helexa.cortex.ledger.ledger import Ledger
from helexa.cortex.ledger.reservations_in_memory import Record
from helexa.cortex.ledger.storage import open_database
from helexa.cortex.ledger.storage.database import Args, Database, Row, Sql, Step
from nightly import cases

KILLS = cases(8, 60)
STEP = 3_000  # the cap rises by this for each victim, so that victims keep reaching it
PER_VICTIM = 8


async def test_caps_hold_and_settled_charges_remain_after_gateways_are_killed(url: str, tmp_path: Path):
    concurrent = 1 if url.startswith("sqlite") else 3  # only one gateway may use a SQLite file
    rng, journal = random.Random(11), tmp_path / "journal"
    journal.touch()
    victims: list[asyncio.subprocess.Process] = []
    for number in range(KILLS + concurrent):
        cap = STEP * (number + 1)
        victims.append(await _victim(url, cap, journal, seed=number))
        if len(victims) >= concurrent:
            kill_newest = number % 2  # the newest victim holds reservations; older ones may only get rejections
            await asyncio.sleep(0 if kill_newest else rng.random() * 0.15)
            await _kill(victims.pop(-1 if kill_newest else rng.randrange(len(victims))))
            assert await _spent_or_leased(url) <= cap
    for process in victims:
        await _kill(process)
    async with running(url, dead_after_secs=0.5):

        async def only_one_gateway() -> bool:
            return len(await rows(url, "SELECT id FROM gateways")) == 1

        await eventually(only_one_gateway)
        assert STEP < await spent(url) == await charged(url) <= STEP * (KILLS + concurrent)
    lines = [line.split() for line in journal.read_text().splitlines()]
    finished = {line[1]: int(line[2]) for line in lines if line[0] == "settled"}
    assert ["refused"] in lines, "the cap was never reached"
    entries = await rows(url, "SELECT request_id, state, charged FROM entries")
    assert {entry["state"] for entry in entries} == {"settled", "orphaned"}
    settled = {entry["request_id"]: entry["charged"] for entry in entries if entry["state"] == "settled"}
    assert finished.items() <= settled.items()
    unrecorded = len(settled) - len(finished)  # settled, but killed before the victim wrote to the test's journal
    assert unrecorded <= PER_VICTIM * (KILLS + concurrent)
    assert len(finished) > 10 * KILLS


async def test_crash_between_any_two_database_steps_keeps_cap_and_charges(url: str):
    database = await open_database(url)
    await database.migrate()
    await database.close()
    steps = 0
    while await _crash_after(url, steps, holder(100, f"key-{steps}")):
        steps += 1
    assert steps > 15


async def _crash_after(url: str, step: int, key: Principal) -> bool:
    """Kill a gateway after `step` database and log calls; return False if it finished before that."""
    database = LimitedDatabase(await open_database(url))
    ledger = Ledger(database)
    await ledger.start()
    database.remaining_calls = step
    if journal := ledger._group_commit._wal:
        journal.add = database.counted(journal.add)

    async def reserve(tokens: int) -> Reservation | ApiError:
        return await try_reserve(ledger, key, tokens)

    async def requests() -> None:
        first, second = await asyncio.gather(reserve(40), reserve(40))
        assert isinstance(first, Reservation) and isinstance(second, Reservation)
        await asyncio.gather(first.settle(10, 0), reserve(45))
        third, *_ = await asyncio.gather(reserve(5), after_turns(3, second.settle, 30, 5), after_turns(4, reserve, 4))
        assert isinstance(third, Reservation)
        await asyncio.gather(reserve(90), after_turns(3, third.settle, 3, 3), after_turns(4, reserve, 80))

    work, exhausted = asyncio.create_task(requests()), asyncio.create_task(database.exhausted.wait())
    await asyncio.wait((work, exhausted), return_when=asyncio.FIRST_COMPLETED)
    died = database.exhausted.is_set()
    if not died:
        work.result()
    await kill(ledger)
    for task in (work, exhausted):
        task.cancel()
    await asyncio.gather(work, exhausted, return_exceptions=True)
    await database.close()
    if journal:
        async with running(url):  # the next gateway replays the write-ahead log
            pass
    else:
        await retire_gateways(url)
    assert await spent(url, key.key_id) == await charged(url, key.key_id) <= 100
    return died


async def after_turns(turns: int, work: Callable[..., Awaitable[Any]], *args: int) -> Any:
    """Await `work(*args)` after `turns` turns of the event loop, while earlier calls wait for the database."""
    for _ in range(turns):
        await asyncio.sleep(0)
    return await work(*args)


class LimitedDatabase:
    """A database that answers `remaining_calls` more calls; every later call waits forever."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.remaining_calls = 1000
        self.exhausted = asyncio.Event()
        self.claim, self.close = database.claim, database.close

    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        await self._step()
        return await self._database.fetch(sql, *args)

    async def write(self, guard: tuple[str, Args], steps: Sequence[Step]) -> bool:
        await self._step()
        return await self._database.write(guard, steps)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Sql]:
        async with self._database.transaction() as sql:
            yield LimitedTransaction(sql, self._step)
            await self._step()

    def counted(self, add: Callable[[Record], bool]) -> Callable[[Record], bool]:
        """Wrap the log's `add` so that it counts as two calls: one before and one after adding the record."""

        def counted(record: Record) -> bool:
            self._count()
            added = add(record)
            self._count()
            return added

        return counted

    async def _step(self) -> None:
        try:
            self._count()
        except CallsExhausted:
            await asyncio.Event().wait()

    def _count(self) -> None:
        if not self.remaining_calls:
            self.exhausted.set()
            raise CallsExhausted
        self.remaining_calls -= 1


class CallsExhausted(Exception):
    pass


class LimitedTransaction:
    def __init__(self, sql: Sql, step: Callable[[], Awaitable[None]]) -> None:
        self._sql, self._step = sql, step

    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        await self._step()
        return await self._sql.fetch(sql, *args)

    async def execute(self, sql: str, *args: Any) -> int:
        await self._step()
        return await self._sql.execute(sql, *args)


async def _victim(url: str, cap: int, journal: Path, seed: int) -> asyncio.subprocess.Process:
    """Start a victim; return after its first settlement."""
    program = Path(crash_victim.__file__)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error",
        str(program),
        url,
        str(cap),
        str(journal),
        str(seed),
        stderr=asyncio.subprocess.PIPE,
    )
    await eventually(lambda: _is_at_work(journal, seed) or process.returncode is not None)
    assert process.returncode is None, await _stderr(process)
    return process


def _is_at_work(journal: Path, seed: int) -> bool:
    return f"working {seed}\n" in journal.read_text()


async def _kill(process: asyncio.subprocess.Process) -> None:
    assert process.returncode is None, await _stderr(process)
    process.kill()
    await process.communicate()


async def _stderr(process: asyncio.subprocess.Process) -> str:
    return (await process.communicate())[1].decode()


async def _spent_or_leased(url: str) -> int:
    """Return the number of tokens spent or leased by all gateways, dead or alive."""
    (row,) = await rows(
        url,
        "SELECT CAST((SELECT SUM(spent) FROM windows) + COALESCE((SELECT SUM(granted) FROM leases), 0) AS BIGINT) AS n",
    )
    return row["n"]
