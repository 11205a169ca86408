"""Gateways killed at random: no cap is ever passed, and what they finished is in the ledger to the token."""

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cortex.ledger import victim
from cortex.ledger.running import charged, holder, kill, rows, running, spent, sweep, try_reserve
from cortex.running import eventually
from helexa.core.errors import ApiError
from helexa.cortex.access.principal import Principal
from helexa.cortex.ledger.entries import Record
from helexa.cortex.ledger.ledger import Ledger
from helexa.cortex.ledger.reservation import Reservation
from helexa.cortex.ledger.storage.backends import open_database
from helexa.cortex.ledger.storage.database import Args, Database, Row, Sql, Step
from nightly import cases

KILLS = cases(8, 60)
STEP = 3_000  # the cap grows by so much from victim to victim, so that it is in reach all the time
PER_VICTIM = 8


async def test_killed_gateways_never_pass_the_cap_and_lose_nothing_finished(url: str, tmp_path: Path):
    at_once = 1 if url.startswith("sqlite") else 3  # a file is one gateway's alone
    chance, journal = random.Random(11), tmp_path / "journal"
    journal.touch()
    victims: list[asyncio.subprocess.Process] = []
    for number in range(KILLS + at_once):
        cap = STEP * (number + 1)
        victims.append(await _victim(url, cap, journal, seed=number))
        if len(victims) >= at_once:
            at_work = number % 2  # the newest one, which holds reservations; others may only be refused by now
            await asyncio.sleep(0 if at_work else chance.random() * 0.15)
            await _kill(victims.pop(-1 if at_work else chance.randrange(len(victims))))
            assert await _held(url) <= cap
    for process in victims:
        await _kill(process)
    async with running(url, dead_after_secs=0.5):

        async def all_swept() -> bool:
            return len(await rows(url, "SELECT id FROM gateways")) == 1

        await eventually(all_swept)
        assert STEP < await spent(url) == await charged(url) <= STEP * (KILLS + at_once)
    lines = [line.split() for line in journal.read_text().splitlines()]
    finished = {line[1]: int(line[2]) for line in lines if line[0] == "settled"}
    assert ["refused"] in lines, "the cap was never reached"
    entries = await rows(url, "SELECT request_id, state, charged FROM entries")
    assert {entry["state"] for entry in entries} == {"settled", "orphaned"}
    settled = {entry["request_id"]: entry["charged"] for entry in entries if entry["state"] == "settled"}
    assert finished.items() <= settled.items()
    unsure = len(settled) - len(finished)  # settled, but killed before the journal knew
    assert unsure <= PER_VICTIM * (KILLS + at_once)
    assert len(finished) > 10 * KILLS


async def test_a_gateway_that_dies_between_any_two_steps_leaves_cap_and_entries_true(url: str):
    database = await open_database(url)
    await database.migrate()
    await database.close()
    steps = 0
    while await _dies_at(url, steps, holder(100, f"key-{steps}")):
        steps += 1
    assert steps > 15


async def _dies_at(url: str, step: int, key: Principal) -> bool:
    """Work until database and journal have answered so often; False if there was less to do."""
    database = CutOff(await open_database(url))
    ledger = Ledger(database)
    await ledger.start()
    database.left = step
    if journal := ledger._committer._journal:
        journal.add = database.counted(journal.add)

    async def reserve(tokens: int) -> Reservation | ApiError:
        return await try_reserve(ledger, key, tokens)

    async def live() -> None:
        first, second = await asyncio.gather(reserve(40), reserve(40))
        assert isinstance(first, Reservation) and isinstance(second, Reservation)
        await asyncio.gather(first.settle(10, 0), reserve(45))
        third, *_ = await asyncio.gather(reserve(5), later(3, second.settle, 30, 5), later(4, reserve, 4))
        assert isinstance(third, Reservation)
        await asyncio.gather(reserve(90), later(3, third.settle, 3, 3), later(4, reserve, 80))

    life, cut = asyncio.create_task(live()), asyncio.create_task(database.cut.wait())
    await asyncio.wait((life, cut), return_when=asyncio.FIRST_COMPLETED)
    died = database.cut.is_set()
    if not died:
        life.result()
    await kill(ledger)
    for task in (life, cut):
        task.cancel()
    await asyncio.gather(life, cut, return_exceptions=True)
    await database.close()
    if journal:
        async with running(url):  # the next gateway finds the journal
            pass
    else:
        await sweep(url)
    assert await spent(url, key.key_id) == await charged(url, key.key_id) <= 100
    return died


async def later(turns: int, work: Callable[..., Awaitable[Any]], *args: int) -> Any:
    """Do it so many turns of the loop later: while others, who asked before, wait for the database."""
    for _ in range(turns):
        await asyncio.sleep(0)
    return await work(*args)


class CutOff:
    """A database that answers `left` more times and then never again."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.left = 1000
        self.cut = asyncio.Event()
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
            yield CutOffTransaction(sql, self._step)
            await self._step()

    def counted(self, add: Callable[[Record], bool]) -> Callable[[Record], bool]:
        """A journal's `add`, after which, or before which, nothing may happen any more."""

        def counted(record: Record) -> bool:
            self._count()
            added = add(record)
            self._count()
            return added

        return counted

    async def _step(self) -> None:
        try:
            self._count()
        except Dead:
            await asyncio.Event().wait()

    def _count(self) -> None:
        if not self.left:
            self.cut.set()
            raise Dead
        self.left -= 1


class Dead(Exception):
    pass


class CutOffTransaction:
    def __init__(self, sql: Sql, step: Callable[[], Awaitable[None]]) -> None:
        self._sql, self._step = sql, step

    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        await self._step()
        return await self._sql.fetch(sql, *args)

    async def execute(self, sql: str, *args: Any) -> int:
        await self._step()
        return await self._sql.execute(sql, *args)


async def _victim(url: str, cap: int, journal: Path, seed: int) -> asyncio.subprocess.Process:
    """Start a victim; return once it has settled something."""
    program = Path(victim.__file__)
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
    assert process.returncode is None, await _words(process)
    return process


def _is_at_work(journal: Path, seed: int) -> bool:
    return f"working {seed}\n" in journal.read_text()


async def _kill(process: asyncio.subprocess.Process) -> None:
    assert process.returncode is None, await _words(process)
    process.kill()
    await process.communicate()


async def _words(process: asyncio.subprocess.Process) -> str:
    return (await process.communicate())[1].decode()


async def _held(url: str) -> int:
    """All that is spent or leased, whoever is alive."""
    (row,) = await rows(
        url,
        "SELECT CAST((SELECT SUM(spent) FROM windows) + COALESCE((SELECT SUM(granted) FROM leases), 0) AS BIGINT) AS n",
    )
    return row["n"]
