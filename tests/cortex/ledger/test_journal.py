"""The journal: what it holds is in the ledger after any death, once, and it is never in anybody's way."""

import asyncio
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from cortex.ledger.running import charged, holder, kill, rows, running, spent, states
from cortex.running import eventually
from helexa.core.errors import HelexaError
from helexa.cortex.ledger.ledger import Ledger
from helexa.cortex.ledger.storage.backends import open_database
from helexa.cortex.ledger.storage.database import Args, Database, DatabaseError, Step
from helexa.cortex.ledger.write_ahead_log import catch_up


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cortex.db"


async def at_work(path: Path) -> tuple[Database, Ledger]:
    """A gateway that works, whose tokens are taken."""
    database = await open_database(f"sqlite:{path}")
    await database.migrate()
    ledger = Ledger(database)
    await ledger.start()
    await (await ledger.reserve(holder(1000), "first", "Org/M", 10)).settle(1, 1)
    await ledger.flush()
    return database, ledger


def lines(path: Path) -> list[bytes]:
    files = sorted(path.parent.glob("*.journal.*"))
    return [line for file in files for line in file.read_bytes().partition(b"\0")[0].splitlines()]


async def test_requests_do_not_wait_for_the_database_and_are_in_it_after_a_death(path: Path):
    url = f"sqlite:{path}"
    async with running(url) as [ledger]:
        await (await ledger.reserve(holder(1000), "first", "Org/M", 10)).settle(1, 1)
        await ledger.flush()
        async with ledger._database.transaction():  # nothing can be written now
            await (await ledger.reserve(holder(1000), "a", "Org/M", 10)).settle(3, 4)
            await (await ledger.reserve(holder(1000), "b", "Org/M", 10)).release()
            still_open = await ledger.reserve(holder(1000), "c", "Org/M", 20)
            database = await open_database(url)
            assert [row["request_id"] for row in await database.fetch("SELECT request_id FROM entries")] == ["first"]
            await database.close()
            assert len(lines(path)) == 1 + 5
        await still_open.settle(20, 1)
        assert await states(url) == ["settled", "settled", "released", "settled"]
        assert await spent(url) == await charged(url) == 2 + 7 + 21


async def test_the_next_gateway_reads_what_the_dead_one_had_promised(path: Path):
    url = f"sqlite:{path}"
    database, ledger = await at_work(path)
    async with database.transaction():
        before = await ledger.reserve(holder(1000), "a", "Org/M", 10)
        await before.settle(3, 4)
        await ledger.reserve(holder(1000), "b", "Org/M", 20)
        await kill(ledger)
    await database.close()
    copies = {file: file.read_bytes() for file in path.parent.glob("*.journal.*")}
    async with running(url) as [heir]:
        assert await states(url) == ["settled", "settled", "orphaned"]
        assert (await heir.budget(holder(1000))).spent == await charged(url) == 2 + 7 + 20
    for file, content in copies.items():  # a journal that comes back from a backup changes nothing
        file.write_bytes(content)
    async with running(url):
        assert await states(url) == ["settled", "settled", "orphaned"]
        assert await spent(url) == await charged(url) == 29


@pytest.mark.parametrize(
    "rest",
    [
        b'["closed",1,"key",0,5,"settled","n",5,',  # the power failed
        b'\0"closed",1,"key",0,5,"settled","n",5,5,0,0,0,2]\n\0',  # its first byte is still to be set
        b'\0["closed",1,"key",0,5,"settled","n",5,5,0,0,0,2]\n',  # of a longer journal before this one
    ],
)
async def test_a_line_that_is_not_whole_is_left_out(path: Path, rest: bytes):
    url = f"sqlite:{path}"
    database = await open_database(url)
    await database.migrate()
    (gateway,) = await database.fetch("SELECT COALESCE(MAX(id), 0) + 1 AS id FROM gateways")
    await database.execute("INSERT INTO gateways (name, batch, low) VALUES ('a', 3, 1)")
    first = b'["opened",1,"a","acme","key",0,"m",10,1]\n'
    path.with_name("cortex.db.journal.0").write_bytes(b"[%d,4]\n" % gateway["id"] + first + rest)
    await catch_up(path, database)
    await catch_up(path, database)
    found = await database.fetch("SELECT request_id, state FROM entries")
    assert found == [{"request_id": "a", "state": "reserved"}]
    assert lines(path) == []
    await database.close()


async def test_where_the_journal_cannot_grow_each_request_waits_for_the_database(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    url = f"sqlite:{path}"
    monkeypatch.setattr("helexa.cortex.ledger.write_ahead_log._BLOCK_BYTES", 1)
    async with running(url) as [ledger]:
        before = await ledger.reserve(holder(1000), "a", "Org/M", 10)
        journal = ledger._committer._journal
        assert journal is not None
        full = os.open("/dev/full", os.O_WRONLY)
        for file in journal._files:
            os.dup2(full, file._descriptor)
        os.close(full)
        await before.settle(3, 4)
        database = await open_database(url)
        assert (await database.fetch("SELECT state FROM entries"))[0]["state"] == "settled"
        await (await ledger.reserve(holder(1000), "b", "Org/M", 10)).settle(1, 1)
        found = await database.fetch("SELECT request_id, state FROM entries WHERE state = 'settled' ORDER BY seq")
        assert [row["request_id"] for row in found] == ["a", "b"]
        await database.close()
        assert await spent(url) == await charged(url) == 9


async def test_on_a_disk_that_is_nearly_full_each_request_waits_for_the_database(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    url = f"sqlite:{path}"
    monkeypatch.setattr("helexa.cortex.ledger.write_ahead_log._LEAST_FREE_BYTES", 1 << 62)
    async with running(url) as [ledger]:
        await (await ledger.reserve(holder(1000), "a", "Org/M", 10)).settle(3, 4)
        assert await states(url) == ["settled"]
        monkeypatch.setattr("helexa.cortex.ledger.write_ahead_log._LEAST_FREE_BYTES", 0)
        await (await ledger.reserve(holder(1000), "b", "Org/M", 10)).settle(1, 1)
        await ledger.flush()
        async with ledger._database.transaction():  # there is room again: nobody waits
            await (await ledger.reserve(holder(1000), "c", "Org/M", 10)).settle(1, 1)
    assert await spent(url) == await charged(url) == 11


async def test_a_journal_grows_with_what_is_promised(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("helexa.cortex.ledger.write_ahead_log._BLOCK_BYTES", 64)
    database, ledger = await at_work(path)
    async with database.transaction():
        for number in range(12):
            await (await ledger.reserve(holder(1000), f"later {number}", "Org/M", 10)).settle(number, 0)
        await kill(ledger)
    await database.close()
    url = f"sqlite:{path}"
    async with running(url):
        assert await states(url) == ["settled"] * 13
        assert await charged(url) == 2 + sum(range(12))


async def test_it_is_its_owners_alone_and_goes_when_nothing_is_in_it(path: Path):
    async with running(f"sqlite:{path}") as [ledger]:
        await (await ledger.reserve(holder(None), "a", "Org/M", 10)).settle(1, 1)
        files = list(path.parent.glob("*.journal.*"))
        assert len(files) == 2
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert not list(path.parent.glob("*.journal.*"))
    assert [row["charged"] for row in await rows(f"sqlite:{path}", "SELECT charged FROM entries")] == [2]


async def test_files_stay_small_while_the_ledger_works(path: Path):
    async with running(f"sqlite:{path}") as [ledger]:
        for _ in range(5):
            for _ in range(400):
                await (await ledger.reserve(holder(None), "a", "Org/M", 10)).settle(1, 1)
            await ledger.flush()
        await eventually(lambda: lines(path) == [])


def refuse(ledger: Ledger, sign: bytes) -> None:
    """Let the disk refuse lines in which this stands, while other lines still fit."""
    journal = ledger._committer._journal
    assert journal is not None
    for file in journal._files:
        add = file.add
        file.add = lambda lines, add=add: sign not in lines and add(lines)


async def test_what_was_promised_before_a_batch_failed_outlives_a_database_that_fails_right_after(path: Path):
    database, ledger = await at_work(path)
    await (await ledger.reserve(holder(1000), "a", "Org/M", 100)).settle(3, 4)
    write, calls = database.write, 0

    async def fail_twice(guard: tuple[str, Args], steps: Sequence[Step]) -> bool:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("a fault in this batch")
        if calls == 2:
            raise DatabaseError("locked for a moment")
        return await write(guard, steps)

    database.write = fail_twice
    await ledger.flush()
    await eventually(lambda: calls > 2 and ledger.available)
    await kill(ledger)
    await database.close()
    url = f"sqlite:{path}"
    async with running(url):
        assert await states(url) == ["settled", "settled"]
        assert await spent(url) == await charged(url) == 2 + 7


async def test_after_a_line_that_did_not_fit_none_is_added_until_a_batch_has_it(path: Path):
    database, ledger = await at_work(path)
    first = await ledger.reserve(holder(1000), "a", "Org/M", 100)
    second = await ledger.reserve(holder(1000), "b", "Org/M", 100)
    await ledger.flush()
    refuse(ledger, b'["closed",2,')
    async with database.transaction():
        settling = [asyncio.create_task(one.settle(used, 0)) for one, used in ((first, 40), (second, 10))]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in settling)
        await kill(ledger)
    for task in settling:
        task.cancel()
    await database.close()
    url = f"sqlite:{path}"
    async with running(url):
        assert await spent(url) == await charged(url) == 2 + 200
        assert await states(url) == ["settled", "orphaned", "orphaned"]


async def test_a_settlement_that_only_a_failed_batch_had_is_made_once_more(path: Path):
    database, ledger = await at_work(path)
    first = await ledger.reserve(holder(1000), "a", "Org/M", 100)
    await ledger.flush()
    write, entered, go = database.write, asyncio.Event(), asyncio.Event()

    async def fail_once(guard: tuple[str, Args], steps: Sequence[Step]) -> bool:
        database.write = write
        entered.set()
        await go.wait()
        raise ValueError("a fault in this batch")

    database.write = fail_once
    await (await ledger.reserve(holder(1000), "b", "Org/M", 100)).settle(1, 0)
    flushing = asyncio.create_task(ledger.flush())
    await entered.wait()
    refuse(ledger, b'["closed",2,')
    settling = asyncio.create_task(first.settle(7, 0))
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(flushing, settling)
    await ledger.close()
    await database.close()
    url = f"sqlite:{path}"
    assert await states(url) == ["settled", "settled", "settled"]
    assert await spent(url) == await charged(url) == 2 + 7 + 1


async def test_error_in_the_committer_loses_nothing_of_the_journal(path: Path):
    database, ledger = await at_work(path)
    committer = ledger._committer
    admit = committer._admit

    def fail_once(now: float) -> NoReturn:
        committer._admit = admit  # type: ignore[method-assign]
        raise ValueError("unexpected")

    async with database.transaction():
        await (await ledger.reserve(holder(1000), "a", "Org/M", 100)).settle(3, 4)
        committer._admit = fail_once  # type: ignore[method-assign]
    await ledger.flush()
    await (await ledger.reserve(holder(1000), "b", "Org/M", 100)).settle(1, 0)
    await ledger.close()
    await database.close()
    url = f"sqlite:{path}"
    assert await states(url) == ["settled", "settled", "settled"]
    assert await spent(url) == await charged(url) == 2 + 7 + 1


async def test_it_lies_beside_the_file_whatever_that_is_called(path: Path, tmp_path: Path):
    link = tmp_path / "elsewhere" / "link.db"
    link.parent.mkdir()
    link.symlink_to(path)
    database, ledger = await at_work(link)
    async with database.transaction():
        await (await ledger.reserve(holder(1000), "a", "Org/M", 100)).settle(3, 4)
        await kill(ledger)
    await database.close()
    assert len(lines(path)) == 3
    async with running(f"sqlite:{path}"):
        assert await states(f"sqlite:{path}") == ["settled", "settled"]


async def test_a_journal_of_tomorrow_is_refused_in_words(path: Path):
    database = await open_database(f"sqlite:{path}")
    await database.migrate()
    path.with_name("cortex.db.journal.1").write_bytes(b'["v2",1]\n["opened",1]\n')
    with pytest.raises(HelexaError, match=r"cortex\.db\.journal\.1 is no journal that this helexa can read"):
        await Ledger(database).start()
    await database.close()
