"""The journal: what it holds is in the ledger after any death, once, and it is never in anybody's way."""

import os
import stat
from pathlib import Path

import pytest

from cortex.ledger.running import charged, holder, kill, rows, running, spent, states
from cortex.running import eventually
from helexa.cortex.ledger.database import open_database
from helexa.cortex.ledger.journal import catch_up
from helexa.cortex.ledger.ledger import Ledger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cortex.db"


def lines(path: Path) -> list[bytes]:
    return [line for file in sorted(path.parent.glob("*.journal.*")) for line in file.read_bytes().splitlines()]


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
    database = await open_database(url)
    await database.migrate()
    ledger = Ledger(database)
    await ledger.start()
    await (await ledger.reserve(holder(1000), "first", "Org/M", 10)).settle(1, 1)
    await ledger.flush()
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


async def test_a_torn_line_is_left_out(path: Path):
    url = f"sqlite:{path}"
    database = await open_database(url)
    await database.migrate()
    (gateway,) = await database.fetch("SELECT COALESCE(MAX(id), 0) + 1 AS id FROM gateways")
    await database.execute("INSERT INTO gateways (name, batch, low) VALUES ('a', 3, 1)")
    first = b'["opened",1,"a","acme","key",0,"m",10,1]\n'
    torn = b'["closed",1,"key",0,5,"settled","n",5,'
    path.with_name("cortex.db.journal.0").write_bytes(b"[%d,4]\n" % gateway["id"] + first + torn)
    await catch_up(path, database)
    await catch_up(path, database)
    found = await database.fetch("SELECT request_id, state FROM entries")
    assert found == [{"request_id": "a", "state": "reserved"}]
    assert lines(path) == []
    await database.close()


async def test_without_room_on_the_disk_each_request_waits_for_the_database(path: Path):
    url = f"sqlite:{path}"
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
