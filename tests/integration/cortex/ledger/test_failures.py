"""Unexpected database errors: the ledger retries, and each charge is written exactly once."""

import asyncio
import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cortex.ledger.ledger_helpers import charged, holder, running, spent, states, try_reserve
from cortex.postgres import Postgres, running_postgres
from cortex.running_gateway import eventually
from helexa.core.errors import ApiError
from helexa.cortex.ledger import gateways
from helexa.cortex.ledger.leases_windows_and_over_budget import Reservation, ReservationRequest
from helexa.cortex.ledger.ledger import Ledger
from helexa.cortex.ledger.storage import database, open_database, postgres, sqlite
from helexa.cortex.ledger.storage.database import DatabaseError

BIG = 90_000


async def rejected_reservation(ledger: Ledger) -> ApiError:
    """Return the error of a reservation that is too large for the gateway's lease."""
    outcome = await try_reserve(ledger, holder(100_000, key="other"), BIG)
    assert isinstance(outcome, ApiError)
    return outcome


async def wait_until_usable(ledger: Ledger) -> None:
    """Wait until a reservation succeeds, and settle it with 1 token."""
    await eventually(lambda: ledger.available)
    await (await ledger.reserve(holder(1000), "after", "Org/M", 100)).settle(1, 0)


async def test_read_only_database_gives_503_until_it_is_writable_again() -> None:
    with running_postgres() as server:
        url = server.new_database()
        async with running(url) as [ledger]:
            reservation = await ledger.reserve(holder(1000), "before", "Org/M", 100)
            server.set_read_only(True)
            await eventually(lambda: not ledger.available)
            settling = asyncio.create_task(reservation.settle(3, 4))
            error = await rejected_reservation(ledger)
            assert (error.status, error.code, error.retry_after) == (503, "service_unavailable", 5)
            server.set_read_only(False)
            await settling
            await wait_until_usable(ledger)
            assert await spent(url) == await charged(url) == 8
        assert await states(url) == ["settled", "settled"]


async def test_postgres_standby_takes_over_after_its_promotion_and_charges_stay_exact() -> None:
    with running_postgres() as primary, running_postgres(primary) as standby:
        primary.wait_for_standbys()
        url = primary.new_database(standby)
        async with running(url) as [ledger]:
            await (await ledger.reserve(holder(1000), "settled", "Org/M", 100)).settle(10, 20)
            reservation = await ledger.reserve(holder(1000), "before", "Org/M", 100)
            primary.stop()
            settling = asyncio.create_task(reservation.settle(3, 4))
            await eventually(lambda: "read-only" in (ledger._group_commit.retry.problem or ""))  # the standby was tried
            assert (await rejected_reservation(ledger)).code == "service_unavailable"
            standby.promote()
            await settling
            await wait_until_usable(ledger)
            assert await spent(url) == await charged(url) == 38
        assert await states(url) == ["settled", "settled", "settled"]


async def test_unresponsive_postgres_host_in_the_url_is_skipped(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helexa.cortex.ledger.storage.postgres._CONNECT_TIMEOUT_SECS", 0.2)

    async def never_respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    url = postgres.new_database()
    silent = await asyncio.start_server(never_respond, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with silent:
        database = await open_database(url.replace("host=", "host=127.0.0.1,") + f"&port={port},5432")
        assert await database.fetch("SELECT 1 AS one") == [{"one": 1}]
        await database.close()


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("postgresql://u:p@db/x", [("db", None)]),
        ("postgresql://u:p@a:1,b:2/x", [("a", 1), ("b", 2)]),
        ("postgresql://[::1]:1,b/x", [("::1", 1), ("b", None)]),
        ("postgresql:///x?host=/run/a,/run/b&port=5", [("/run/a", 5), ("/run/b", 5)]),
        ("postgresql:///x", [("", None)]),
    ],
)
def test_postgres_hosts_and_ports_are_read_from_the_url(url: str, hosts: list[tuple[str, int | None]]) -> None:
    assert postgres._hosts(url) == hosts


class BrokenDatabase:
    """A database whose methods raise an unexpected exception until they are repaired."""

    def __init__(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        for name in ("write", "fetch", "transaction"):
            monkeypatch.setattr(ledger._database, name, self._fail)

    def _fail(self, *args: Any) -> NoReturn:
        raise RuntimeError("unexpected")

    def repair(self) -> None:
        self._patch.undo()


async def test_ledger_settles_and_reserves_again_after_unexpected_database_exceptions(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(url, shared=True) as [ledger]:
        reservation = await ledger.reserve(holder(1000), "before", "Org/M", 100)
        broken_database = BrokenDatabase(ledger, monkeypatch)
        settling = asyncio.create_task(reservation.settle(3, 4))
        await eventually(lambda: not ledger.available)
        assert (await rejected_reservation(ledger)).code == "service_unavailable"
        broken_database.repair()
        await settling
        await wait_until_usable(ledger)
        assert await spent(url) == await charged(url) == 8
        assert await states(url) == ["settled", "settled"]


async def test_unexpected_error_in_the_group_commit_task_loses_no_settlement(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(url, shared=True) as [ledger]:
        committer = ledger._group_commit
        reservation = await ledger.reserve(holder(1000), "before", "Org/M", 100)

        def fail(*_: Any) -> NoReturn:
            raise RuntimeError("unexpected")

        monkeypatch.setattr(committer, "_admit", fail)
        settling = asyncio.create_task(reservation.settle(3, 4))
        gateway = committer.budgets.gateway
        await eventually(lambda: committer.budgets.gateway != gateway)  # the committer registered as a new gateway
        monkeypatch.undo()
        await settling
        await wait_until_usable(ledger)
        assert await spent(url) == await charged(url) == 8


async def test_each_request_of_a_batch_gets_a_response_if_admitting_one_of_them_fails(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(url, shared=True) as [ledger], asyncio.timeout(60):
        budgets = ledger._group_commit.budgets
        admit = budgets.admit

        def fail_for_one_key(request: ReservationRequest, *arguments: Any) -> Any:
            if request.principal.key_id == "broken":
                raise RuntimeError("unexpected")
            return admit(request, *arguments)

        monkeypatch.setattr(budgets, "admit", fail_for_one_key)
        # The second request waits for a transaction of its own, because its key's cap has changed.
        principals = [holder(100), holder(200), holder(key="broken"), holder(key="after")]
        outcomes = await asyncio.gather(*(try_reserve(ledger, principal, 10) for principal in principals))
        errors = [outcome.code for outcome in outcomes[:3] if isinstance(outcome, ApiError)]
        assert errors == ["service_unavailable"] * 3
        assert isinstance(outcomes[3], Reservation)
        await wait_until_usable(ledger)


async def test_heartbeat_of_the_gateway_continues_after_unexpected_exceptions(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(url, shared=True, dead_after_secs=0.4) as [ledger]:
        failed = asyncio.Event()

        async def fail(*args: Any) -> NoReturn:
            failed.set()
            raise RuntimeError("unexpected")

        monkeypatch.setattr(gateways, "present", fail)
        await failed.wait()
        monkeypatch.undo()
        batch = ledger._group_commit.budgets.batch
        await eventually(lambda: ledger._group_commit.budgets.batch > batch + 1)


async def test_periodic_work_logs_its_first_failure_and_its_recovery_once(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = iter([ValueError("a"), OSError("b"), None, None])
    done = asyncio.Event()

    async def work() -> None:
        outcome = next(outcomes, done)
        if outcome is done:
            done.set()
        elif outcome is not None:
            raise outcome

    with caplog.at_level("INFO", database.__name__):
        task = asyncio.create_task(database.repeat(work, 0, "work fails"))
        await done.wait()
        task.cancel()
    assert caplog.messages == [
        "periodic work failed problem='work fails' error=a retry_secs=0; the work is tried again",
        "periodic work succeeds again problem='work fails'",
    ]


async def test_settlement_is_retried_until_a_locked_sqlite_database_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_BUSY_TIMEOUT_SECS", 0.01)
    url = f"sqlite:{tmp_path}/cortex.db"
    async with running(url) as [ledger]:
        reservation = await ledger.reserve(holder(1000), "before", "Org/M", 100)
        assert await ledger.writable()
        ledger._group_commit.retry.written_at = 0.0
        with sqlite3.connect(tmp_path / "cortex.db", isolation_level=None) as lock_holder:
            lock_holder.execute("BEGIN IMMEDIATE")
            assert not await ledger.writable()
            assert (await rejected_reservation(ledger)).code == "service_unavailable"
            lock_holder.execute("ROLLBACK")
        lock_holder.close()
        await reservation.settle(3, 4)
        await wait_until_usable(ledger)
        assert await spent(url) == await charged(url) == 8


async def test_ledger_is_usable_again_after_the_full_disk_under_sqlite_has_space(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/cortex.db"

    def limit(pages: int) -> Any:
        return lambda connection: connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()

    async with running(url, shared=True) as [ledger]:
        await ledger._database._writer.run(limit(1))  # SQLite raises the limit to the current number of pages
        database = ledger._database
        with pytest.raises(DatabaseError, match="full"):
            for number in range(100):
                await database.execute("INSERT INTO windows VALUES ($1, 1, 1)", f"{number:0900}")
        await ledger._database._writer.run(limit(1 << 30))
        await wait_until_usable(ledger)


async def test_sqlite_reconnects_after_an_io_error(tmp_path: Path) -> None:
    path = tmp_path / "cortex.db"
    database = await open_database(f"sqlite:{path}")
    await database.migrate()
    null = os.open("/dev/null", os.O_RDONLY)
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if str(entry.readlink()) == f"{path}-wal":
                os.dup2(null, int(entry.name))  # writes to it fail from now on
    os.close(null)
    insert = "INSERT INTO windows VALUES ($1, 1, 1)"
    with pytest.raises(DatabaseError, match="disk I/O error"):
        await database.execute(insert, "a")
    await database.execute(insert, "b")
    assert await database.fetch("SELECT key_id FROM windows") == [{"key_id": "b"}]
    await database.close()
