"""The write-ahead log: after a crash the next gateway writes each of its records to the database exactly once."""

import asyncio
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from cortex.ledger.ledger_helpers import charged, holder, kill, rows, running, spent, states
from cortex.running_gateway import eventually
from helexa.core.errors import HelexaError
from helexa.cortex.ledger.ledger import Ledger
from helexa.cortex.ledger.storage import open_database
from helexa.cortex.ledger.storage.database import Args, Database, DatabaseError, Step
from helexa.cortex.ledger.write_ahead_log import catch_up


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cortex.db"


async def busy_gateway(path: Path) -> tuple[Database, Ledger]:
    """Return the database and ledger of a running gateway that holds a lease for the test key."""
    database = await open_database(f"sqlite:{path}")
    await database.migrate()
    ledger = Ledger(database)
    await ledger.start()
    await (await ledger.reserve(holder(1000), "first", "Org/M", 10)).settle(1, 1)
    await ledger.flush()
    return database, ledger


def log_lines(path: Path) -> list[bytes]:
    files = sorted(path.parent.glob("*.journal.*"))
    return [line for file in files for line in file.read_bytes().partition(b"\0")[0].splitlines()]


async def test_reservations_are_settled_in_the_log_while_the_database_is_locked(path: Path):
    url = f"sqlite:{path}"
    async with running(url) as [ledger]:
        await (await ledger.reserve(holder(1000), "first", "Org/M", 10)).settle(1, 1)
        await ledger.flush()
        async with ledger._database.transaction():  # locks out the committer
            await (await ledger.reserve(holder(1000), "a", "Org/M", 10)).settle(3, 4)
            await (await ledger.reserve(holder(1000), "b", "Org/M", 10)).release()
            still_open = await ledger.reserve(holder(1000), "c", "Org/M", 20)
            database = await open_database(url)
            assert [row["request_id"] for row in await database.fetch("SELECT request_id FROM entries")] == ["first"]
            await database.close()
            assert len(log_lines(path)) == 1 + 5
        await still_open.settle(20, 1)
        assert await states(url) == ["settled", "settled", "released", "settled"]
        assert await spent(url) == await charged(url) == 2 + 7 + 21


async def test_next_gateway_replays_the_write_ahead_log_of_a_dead_gateway(path: Path):
    url = f"sqlite:{path}"
    database, ledger = await busy_gateway(path)
    async with database.transaction():
        settled = await ledger.reserve(holder(1000), "a", "Org/M", 10)
        await settled.settle(3, 4)
        await ledger.reserve(holder(1000), "b", "Org/M", 20)
        await kill(ledger)
    await database.close()
    copies = {file: file.read_bytes() for file in path.parent.glob("*.journal.*")}
    async with running(url) as [heir]:
        assert await states(url) == ["settled", "settled", "orphaned"]
        assert (await heir.budget(holder(1000))).spent == await charged(url) == 2 + 7 + 20
    for file, content in copies.items():  # log files restored from a backup change nothing
        file.write_bytes(content)
    async with running(url):
        assert await states(url) == ["settled", "settled", "orphaned"]
        assert await spent(url) == await charged(url) == 29


@pytest.mark.parametrize(
    "ending",
    [
        b'["closed",1,"key",0,5,"settled","n",5,',  # the line was cut off by a power failure
        b'\0"closed",1,"key",0,5,"settled","n",5,5,0,0,0,2]\n\0',  # its first byte is not written yet
        b'\0["closed",1,"key",0,5,"settled","n",5,5,0,0,0,2]\n',  # a line left from earlier, longer content of the file
    ],
)
async def test_incomplete_or_damaged_line_of_the_write_ahead_log_is_ignored(path: Path, ending: bytes):
    url = f"sqlite:{path}"
    database = await open_database(url)
    await database.migrate()
    (gateway,) = await database.fetch("SELECT COALESCE(MAX(id), 0) + 1 AS id FROM gateways")
    await database.execute("INSERT INTO gateways (name, batch, low) VALUES ('a', 3, 1)")
    first = b'["opened",1,"a","acme","key",0,"m",10,1]\n'
    path.with_name("cortex.db.journal.0").write_bytes(b"[%d,4]\n" % gateway["id"] + first + ending)
    await catch_up(path, database)
    await catch_up(path, database)
    entries = await database.fetch("SELECT request_id, state FROM entries")
    assert entries == [{"request_id": "a", "state": "reserved"}]
    assert log_lines(path) == []
    await database.close()


async def test_settlements_wait_for_the_database_if_the_log_file_cannot_grow(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    url = f"sqlite:{path}"
    monkeypatch.setattr("helexa.cortex.ledger.write_ahead_log._GROWTH_BYTES", 1)
    async with running(url) as [ledger]:
        reservation = await ledger.reserve(holder(1000), "a", "Org/M", 10)
        log = ledger._group_commit._wal
        assert log is not None
        full = os.open("/dev/full", os.O_WRONLY)
        for file in log._files:
            os.dup2(full, file._descriptor)
        os.close(full)
        await reservation.settle(3, 4)
        database = await open_database(url)
        assert (await database.fetch("SELECT state FROM entries"))[0]["state"] == "settled"
        await (await ledger.reserve(holder(1000), "b", "Org/M", 10)).settle(1, 1)
        entries = await database.fetch("SELECT request_id, state FROM entries WHERE state = 'settled' ORDER BY seq")
        assert [row["request_id"] for row in entries] == ["a", "b"]
        await database.close()
        assert await spent(url) == await charged(url) == 9


async def test_settlements_wait_for_the_database_if_the_disk_is_nearly_full(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    url = f"sqlite:{path}"
    monkeypatch.setattr("helexa.cortex.ledger.write_ahead_log._MIN_FREE_BYTES", 1 << 62)
    async with running(url) as [ledger]:
        await (await ledger.reserve(holder(1000), "a", "Org/M", 10)).settle(3, 4)
        assert await states(url) == ["settled"]
        monkeypatch.setattr("helexa.cortex.ledger.write_ahead_log._MIN_FREE_BYTES", 0)
        await (await ledger.reserve(holder(1000), "b", "Org/M", 10)).settle(1, 1)
        await ledger.flush()
        async with ledger._database.transaction():  # the log has space again, so requests do not wait
            await (await ledger.reserve(holder(1000), "c", "Org/M", 10)).settle(1, 1)
    assert await spent(url) == await charged(url) == 11


async def test_log_file_grows_if_its_records_need_more_space(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("helexa.cortex.ledger.write_ahead_log._GROWTH_BYTES", 64)
    database, ledger = await busy_gateway(path)
    async with database.transaction():
        for number in range(12):
            await (await ledger.reserve(holder(1000), f"later {number}", "Org/M", 10)).settle(number, 0)
        await kill(ledger)
    await database.close()
    url = f"sqlite:{path}"
    async with running(url):
        assert await states(url) == ["settled"] * 13
        assert await charged(url) == 2 + sum(range(12))


async def test_write_ahead_log_files_are_readable_only_by_the_owner_and_removed_if_empty(path: Path):
    async with running(f"sqlite:{path}") as [ledger]:
        await (await ledger.reserve(holder(None), "a", "Org/M", 10)).settle(1, 1)
        files = list(path.parent.glob("*.journal.*"))
        assert len(files) == 2
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert not list(path.parent.glob("*.journal.*"))
    assert [row["charged"] for row in await rows(f"sqlite:{path}", "SELECT charged FROM entries")] == [2]


async def test_writing_to_the_database_empties_the_log_files(path: Path):
    async with running(f"sqlite:{path}") as [ledger]:
        for _ in range(5):
            for _ in range(400):
                await (await ledger.reserve(holder(None), "a", "Org/M", 10)).settle(1, 1)
            await ledger.flush()
        await eventually(lambda: log_lines(path) == [])


def refuse_lines_with(ledger: Ledger, marker: bytes) -> list[bytes]:
    """Make appending lines that contain `marker` fail; other lines are still appended.

    Returns the refused data, a list that grows.
    """
    refused: list[bytes] = []
    log = ledger._group_commit._wal
    assert log is not None
    for file in log._files:

        def add(data: bytes, add: Callable[[bytes], bool] = file.add) -> bool:
            if marker in data:
                refused.append(data)
                return False
            return add(data)

        file.add = add
    return refused


async def test_logged_settlement_survives_a_failed_batch_and_a_database_error(path: Path):
    database, ledger = await busy_gateway(path)
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


async def test_failed_write_to_the_log_disables_the_log_until_the_next_batch(path: Path):
    database, ledger = await busy_gateway(path)
    first = await ledger.reserve(holder(1000), "a", "Org/M", 100)
    second = await ledger.reserve(holder(1000), "b", "Org/M", 100)
    await ledger.flush()
    refused = refuse_lines_with(ledger, b'["closed",2,')
    async with database.transaction():
        settling = [
            asyncio.create_task(reservation.settle(used, 0)) for reservation, used in ((first, 40), (second, 10))
        ]
        await eventually(lambda: refused)
        assert not any(task.done() for task in settling)
        await kill(ledger)
    for task in settling:
        task.cancel()
    await database.close()
    url = f"sqlite:{path}"
    async with running(url):
        assert await spent(url) == await charged(url) == 2 + 200
        assert await states(url) == ["settled", "orphaned", "orphaned"]


async def test_settlement_in_a_failed_database_batch_is_written_again(path: Path):
    database, ledger = await busy_gateway(path)
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
    refuse_lines_with(ledger, b'["closed",2,')
    settling = asyncio.create_task(first.settle(7, 0))
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(flushing, settling)
    await ledger.close()
    await database.close()
    url = f"sqlite:{path}"
    assert await states(url) == ["settled", "settled", "settled"]
    assert await spent(url) == await charged(url) == 2 + 7 + 1


async def test_unexpected_error_in_the_group_commit_task_loses_no_log_record(path: Path):
    database, ledger = await busy_gateway(path)
    committer = ledger._group_commit
    admit = committer._admit

    def fail_once(*_: object) -> NoReturn:
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


async def test_log_is_next_to_the_database_file_that_a_symbolic_link_names(path: Path, tmp_path: Path):
    link = tmp_path / "elsewhere" / "link.db"
    link.parent.mkdir()
    link.symlink_to(path)
    database, ledger = await busy_gateway(link)
    async with database.transaction():
        await (await ledger.reserve(holder(1000), "a", "Org/M", 100)).settle(3, 4)
        await kill(ledger)
    await database.close()
    assert len(log_lines(path)) == 3
    async with running(f"sqlite:{path}"):
        assert await states(f"sqlite:{path}") == ["settled", "settled"]


async def test_log_written_by_a_newer_version_is_rejected(path: Path):
    database = await open_database(f"sqlite:{path}")
    await database.migrate()
    path.with_name("cortex.db.journal.1").write_bytes(b'["v2",1]\n["opened",1]\n')
    with pytest.raises(HelexaError, match=r"cortex\.db\.journal\.1 is not a write-ahead log of this helexa version"):
        await Ledger(database).start()
    await database.close()
