"""The database interface on SQLite and PostgreSQL: placeholders, transactions, batches, migrations."""

import asyncio
import re
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cortex.postgres import Postgres
from helexa.core.errors import HelexaError
from helexa.cortex.ledger.storage import open_database
from helexa.cortex.ledger.storage.database import Database, DatabaseError
from helexa.cortex.ledger.storage.sqlite import _run_for_each

COUNT = "SELECT COUNT(*) AS n FROM windows"
INSERT = "INSERT INTO windows (key_id, window_id, spent) VALUES ($1, $2, $3)"


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    database = await open_database(url)
    await database.migrate()
    yield database
    await database.close()


@pytest.mark.parametrize("most", [999, 32_766])  # SQLite's limit of parameters, before version 3.32 and since
def test_batch_is_split_into_statements_within_sqlites_variable_limit(most: int):
    connection = sqlite3.connect(":memory:")
    connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, most)
    columns = [f"c{number}" for number in range(21)]
    connection.execute(f"CREATE TABLE t ({', '.join(columns)})")
    insert = f"INSERT INTO t ({', '.join(columns)}) VALUES ({', '.join(f'${number + 1}' for number in range(21))})"
    rows = [tuple(range(row, row + 21)) for row in range(300)]
    _run_for_each(connection, insert, rows)
    assert connection.execute("SELECT * FROM t ORDER BY c0").fetchall() == rows
    _run_for_each(connection, "UPDATE t SET c1 = $2 WHERE c0 = $1", [(row, -row) for row in range(300)])
    assert connection.execute("SELECT SUM(c0 + c1), COUNT(*) FROM t").fetchall() == [(0, 300)]
    connection.close()


async def test_sql_placeholders_may_be_repeated_and_used_in_any_order(database: Database):
    assert await database.execute(INSERT, "k", 1, 5) == 1
    assert await database.execute("UPDATE windows SET spent = $2 WHERE window_id = $1 AND spent <> $2", 1, 7) == 1
    assert await database.execute("UPDATE windows SET spent = 0 WHERE key_id = $1", "other") == 0
    assert await database.fetch("SELECT key_id, spent FROM windows") == [{"key_id": "k", "spent": 7}]


async def test_failed_transaction_is_rolled_back(database: Database):
    with pytest.raises(KeyError):
        async with database.transaction() as sql:
            await sql.execute(INSERT, "k", 1, 5)
            assert (await sql.fetch(COUNT))[0]["n"] == 1
            raise KeyError
    assert (await database.fetch(COUNT))[0]["n"] == 0
    async with database.transaction() as sql:
        rows = await sql.fetch(INSERT + " RETURNING spent", "k", 1, 5)
    assert rows == [{"spent": 5}]
    assert (await database.fetch(COUNT))[0]["n"] == 1


async def test_cancelled_transaction_rolls_back_and_frees_the_lock(database: Database):
    entered = asyncio.Event()

    async def stall() -> None:
        async with database.transaction() as sql:
            await sql.execute(INSERT, "k", 1, 5)
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(stall())
    await entered.wait()
    task.cancel()
    await asyncio.wait([task])
    await database.execute(INSERT, "k", 1, 6)
    assert await database.fetch("SELECT spent FROM windows") == [{"spent": 6}]


async def test_batch_of_statements_is_written_only_if_its_guard_statement_changes_a_row(database: Database):
    await database.execute(INSERT, "guard", 0, 0)
    guard = "UPDATE windows SET spent = $2 WHERE key_id = 'guard' AND spent = $1"
    steps = [
        (INSERT, [("a", 1, 1), ("b", 1, 2)]),
        ("UPDATE windows SET spent = spent + $1 WHERE key_id = $2", [(5, "a")]),
    ]
    assert await database.write((guard, (0, 1)), steps)
    assert not await database.write((guard, (0, 1)), [("DELETE FROM windows", [()])])
    rows = await database.fetch("SELECT key_id, spent FROM windows ORDER BY key_id")
    assert [(row["key_id"], row["spent"]) for row in rows] == [("a", 6), ("b", 2), ("guard", 1)]


async def test_batch_of_statements_is_rolled_back_if_one_of_them_fails(database: Database):
    await database.execute(INSERT, "guard", 0, 0)
    guard = ("UPDATE windows SET spent = 1 WHERE key_id = 'guard'", ())
    with pytest.raises(Exception, match=r"(?i)unique"):
        await database.write(guard, [(INSERT, [("a", 1, 1), ("a", 1, 1)])])
    assert await database.fetch("SELECT key_id, spent FROM windows") == [{"key_id": "guard", "spent": 0}]


async def test_all_rows_of_a_batch_of_many_rows_are_written(database: Database):
    await database.execute(INSERT, "guard", 0, 0)
    guard = ("UPDATE windows SET spent = 1 WHERE key_id = 'guard'", ())
    inserted = [(f"k{number}", number, 2 * number) for number in range(75)]
    repeated = [("k74", 74, 5), *((f"k{number}", number, 1) for number in range(75, 140))]
    ignore = INSERT + " ON CONFLICT DO NOTHING"
    assert await database.write(guard, [(INSERT, inserted), (ignore, repeated)])
    rows = await database.fetch("SELECT key_id, window_id, spent FROM windows WHERE key_id <> 'guard'")
    assert {tuple(row.values()) for row in rows} == {*inserted, *repeated[1:]}


async def test_concurrent_migrations_succeed(url: str):
    databases = [await open_database(url) for _ in range(4)]
    await asyncio.gather(*(database.migrate() for database in databases))
    await databases[0].migrate()
    rows = await databases[1].fetch("SELECT version, name FROM migrations ORDER BY version")
    assert rows == [{"version": 4, "name": "0004_ledger"}]
    for database in databases:
        await database.close()


async def test_database_with_a_newer_schema_version_is_rejected(database: Database):
    await database.execute("INSERT INTO migrations VALUES (9999, 'of_tomorrow', 0)")
    with pytest.raises(HelexaError, match="version 9999, newer than this helexa"):
        await database.migrate()


async def test_database_with_an_unreleased_schema_version_is_rejected_with_advice(database: Database):
    await database.execute("UPDATE migrations SET version = 3")
    with pytest.raises(HelexaError, match=r"version 3, from an unreleased helexa; (move the files|set ledger)"):
        await database.migrate()


async def test_sqlite_database_with_an_unreleased_schema_can_be_moved_away_as_advised(tmp_path: Path):
    """The advice names the files, because a user of `helexa up` has not set `ledger.url`."""
    url = f"sqlite:{tmp_path}/cortex.db"
    database = await open_database(url)
    await database.migrate()
    await database.execute("UPDATE migrations SET version = 3")
    with pytest.raises(HelexaError, match=re.escape(f"move the files {tmp_path}/cortex.db* away")):
        await database.migrate()
    await database.close()
    for file in tmp_path.glob("cortex.db*"):
        file.rename(tmp_path / f"old-{file.name}")
    database = await open_database(url)
    await database.migrate()
    await database.close()


async def test_sqlite_file_is_accessible_to_its_owner_only(tmp_path: Path):
    path = tmp_path / "state" / "cortex.db"
    database = await open_database(f"sqlite:{path}")
    await database.migrate()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}
    await database.close()
    assert [file.name for file in path.parent.iterdir()] == ["cortex.db"]


async def test_invalid_database_urls_are_rejected(tmp_path: Path, postgres: Postgres):
    (tmp_path / "text").write_text("this is not a database, and never was one\n" * 50)
    unknown = postgres.new_database().replace("/test_ledger", "/nobody_made")
    for url, message in [
        ("mysql://root:secret@host/db", "neither sqlite:PATH nor postgresql"),
        ("sqlite:", "neither sqlite:PATH"),
        (f"sqlite:{tmp_path / 'text'}", "not a database"),
        (f"sqlite:{tmp_path}", "cannot open the ledger"),
        ("postgresql://u:secret@127.0.0.1:1/db", "does not answer"),
        ("postgresql://u:secret@host:port/db", "malformed"),
        (unknown, "does not exist"),
    ]:
        with pytest.raises(HelexaError, match=message) as caught:
            await open_database(url)
        assert "secret" not in str(caught.value)


async def test_stopped_postgres_raises_database_error_until_restarted():
    from cortex.postgres import running_postgres

    with running_postgres() as server:
        database = await open_database(server.new_database())
        await database.migrate()
        server.stop()
        with pytest.raises(DatabaseError):
            await database.fetch(COUNT)
        with pytest.raises(DatabaseError):
            async with database.transaction():
                pass
        server.start()
        assert await database.fetch(COUNT) == [{"n": 0}]
        await database.close()
