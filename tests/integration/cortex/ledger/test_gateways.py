"""Several gateways on one database: leases, dead gateways, gateways wrongly marked dead, and outages."""

import asyncio
import random
from collections.abc import Sequence

import pytest

from cortex.ledger.ledger_helpers import (
    Clock,
    charged,
    holder,
    kill,
    retire_gateways,
    rows,
    running,
    spent,
    states,
    try_reserve,
)
from cortex.postgres import running_postgres
from cortex.running_gateway import eventually
from helexa.core.errors import ApiError
from helexa.cortex.access.keys import Window
from helexa.cortex.ledger.leases_windows_and_over_budget import Reservation
from helexa.cortex.ledger.ledger import Ledger
from helexa.cortex.ledger.storage import open_database
from helexa.cortex.ledger.storage.database import Args, DatabaseError, Step

CAP = 10_000


async def work(ledger: Ledger, rng: random.Random, cap: int = CAP) -> int:
    """Run one request; return the tokens it used, 0 if it was rejected or released."""
    tokens = rng.randint(50, 200)
    try:
        reservation = await ledger.reserve(holder(cap), "r", "Org/M", tokens)
    except ApiError as error:
        assert error.code == "insufficient_quota"
        return 0
    await asyncio.sleep(rng.random() * 0.01)
    if rng.random() < 0.1:
        await reservation.release()
        return 0
    prompt = rng.randint(1, 40)
    used = prompt + rng.randint(0, tokens - prompt)
    await reservation.settle(prompt, used - prompt)
    return used


@pytest.mark.parametrize("count", [1, 3])
async def test_tokens_used_by_concurrent_requests_stay_within_the_hard_cap_of_the_key(url: str, count: int):
    rng = random.Random(7)
    async with running(url, count=count) as ledgers:
        used = await asyncio.gather(*(work(ledgers[n % count], rng) for n in range(200)))
        assert 0 < sum(used) <= CAP
        assert sum(used) == await spent(url) == await charged(url)
        remaining = CAP - sum(used)

        async def remaining_is_free() -> bool:
            outcome = await try_reserve(ledgers[0], holder(CAP), remaining)
            if isinstance(outcome, Reservation):
                await outcome.release()
            return isinstance(outcome, Reservation)

        await eventually(remaining_is_free)
        assert isinstance(await try_reserve(ledgers[0], holder(CAP), remaining + 1), ApiError)
        assert [ledger.open for ledger in ledgers] == [0] * count


async def test_gateways_together_reserve_at_most_the_hard_cap_of_a_key(url: str):
    async with running(url, count=3) as ledgers:
        outcomes = await asyncio.gather(*(try_reserve(ledgers[n % 3], holder(100), 7) for n in range(200)))
        reservations = [outcome for outcome in outcomes if isinstance(outcome, Reservation)]
        assert len(reservations) == 14
        await asyncio.gather(*(reservation.settle(7, 0) for reservation in reservations))
        assert await spent(url) == 98


async def test_concurrent_reservations_of_one_key_at_three_gateways_do_not_exceed_its_cap(url: str):
    async with running(url, count=3) as ledgers:
        keys = [holder(100, f"key-{number}") for number in range(20)]
        for key in keys:  # otherwise the gateways would wait for the first one to insert the window
            await (await ledgers[0].reserve(key, "r", "Org/M", 1)).release()
        outcomes = await asyncio.gather(*(try_reserve(ledger, key, 60) for ledger in ledgers for key in keys))
        succeeded = [isinstance(outcome, Reservation) for outcome in outcomes]
        assert [succeeded[n] + succeeded[n + 20] + succeeded[n + 40] for n in range(20)] == [1] * 20


async def test_usage_above_the_reservation_at_one_gateway_reduces_the_budget_at_another(url: str):
    async with running(url, count=2) as [ledger, other_ledger]:
        overspent = await ledger.reserve(holder(200), "a", "Org/M", 50)
        second = await ledger.reserve(holder(200), "b", "Org/M", 50)
        await overspent.settle(90, 30)
        at_other = await other_ledger.reserve(holder(200), "c", "Org/M", 30)
        assert isinstance(await try_reserve(other_ledger, holder(200), 1), ApiError)
        await second.settle(20, 0)
        assert isinstance(await try_reserve(ledger, holder(200), 31), ApiError)
        await at_other.settle(30, 0)
        assert isinstance(await try_reserve(ledger, holder(200), 30), Reservation)


async def test_gateways_with_one_database_agree_on_the_start_of_a_budget_window(url: str):
    clock, key = Clock(), holder(1000, window=Window("rolling", 60))

    async def use(ledger: Ledger) -> None:
        await (await ledger.reserve(key, "r", "Org/M", 10)).settle(10, 0)

    async with running(url, count=3, clock=clock) as ledgers:
        await asyncio.gather(*(use(ledger) for ledger in ledgers))
        clock.now += 30
        await asyncio.gather(*(use(ledger) for ledger in ledgers))
        clock.now += 30
        await asyncio.gather(*(use(ledger) for ledger in ledgers))
        budgets = [await ledger.budget(key) for ledger in ledgers]
        assert {budget.spent for budget in budgets} == {30}
    windows = await rows(url, "SELECT window_id, spent FROM windows ORDER BY window_id")
    assert [tuple(row.values()) for row in windows] == [(0, 0), (1_700_000_000, 60), (1_700_000_060, 30)]


async def test_open_reservations_of_a_dead_gateway_are_charged_and_its_lease_is_returned(url: str):
    async with running(url, count=2, dead_after_secs=0.5) as [victim, survivor]:
        await (await victim.reserve(holder(1000), "a", "Org/M", 100)).settle(30, 0)
        await victim.reserve(holder(1000), "b", "Org/M", 100)
        await kill(victim)

        async def victim_swept() -> bool:
            return await states(url) == ["settled", "orphaned"]

        await eventually(victim_swept)
        assert await spent(url) == await charged(url) == 130
        assert len(await rows(url, "SELECT * FROM gateways")) == 1
        assert isinstance(await try_reserve(survivor, holder(1000), 871), ApiError)
        assert isinstance(await try_reserve(survivor, holder(1000), 870), Reservation)


async def test_idle_gateway_that_sends_heartbeats_is_not_treated_as_dead(url: str):
    async with running(url, count=2, dead_after_secs=1.5) as [quiet, _]:
        reservation = await quiet.reserve(holder(1000), "a", "Org/M", 100)
        heartbeats = "SELECT id, batch FROM gateways ORDER BY id"
        first = await rows(url, heartbeats)

        async def both_sent_heartbeats() -> bool:
            return all(
                now["batch"] > previous["batch"] + 6
                for now, previous in zip(await rows(url, heartbeats), first, strict=True)
            )

        await eventually(both_sent_heartbeats)
        await reservation.settle(5, 5)
        assert await states(url) == ["settled"]


async def test_gateway_that_was_wrongly_treated_as_dead_settles_exactly(url: str):
    async with running(url, count=2) as [slow, other_ledger]:
        settled = await slow.reserve(holder(1000), "a", "Org/M", 100)
        released = await slow.reserve(holder(1000), "b", "Org/M", 100)
        late = await slow.reserve(holder(1000), "c", "Org/M", 100)
        await retire_gateways(url, 1)
        assert await states(url) == ["orphaned"] * 3
        assert await spent(url) == 300
        assert isinstance(await try_reserve(other_ledger, holder(1000), 701), ApiError)
        await asyncio.gather(settled.settle(10, 20), released.release())
        await settled.settle(10, 20)
        assert await states(url) == ["settled", "released", "orphaned"]
        assert await spent(url) == await charged(url) == 130
        await (await slow.reserve(holder(1000), "d", "Org/M", 100)).settle(1, 1)
        await late.settle(1, 1)
        assert await states(url) == ["settled", "released", "settled", "settled"]
        assert await spent(url) == await charged(url) == 34


async def test_end_of_a_gateway_is_logged_only_if_the_gateway_has_open_reservations(
    url: str, caplog: pytest.LogCaptureFixture
):
    async with running(url) as [ledger]:
        await (await ledger.reserve(holder(1000), "a", "Org/M", 100)).settle(1, 1)
    assert "open reservations" not in caplog.text
    async with running(url) as [ledger]:
        await ledger.reserve(holder(1000), "b", "Org/M", 100)
        await retire_gateways(url)
        assert "gateway ended with open reservations gateway=" in caplog.text


async def test_next_gateway_on_a_sqlite_file_charges_open_reservations_of_its_predecessor(tmp_path):
    url = f"sqlite:{tmp_path / 'cortex.db'}"
    database = await open_database(url)
    await database.migrate()
    ledger = Ledger(database)
    await ledger.start()
    await (await ledger.reserve(holder(1000), "a", "Org/M", 100)).settle(30, 0)
    await ledger.reserve(holder(1000), "b", "Org/M", 100)
    await kill(ledger)
    await database.close()
    async with running(url) as [heir]:
        assert await states(url) == ["settled", "orphaned"]
        assert (await heir.budget(holder(1000))).spent == 130


async def test_database_error_in_a_batch_affects_only_that_batch(url: str):
    async with running(url, shared=True) as [ledger]:
        reservation = await ledger.reserve(holder(1000), "a", "Org/M", 100)
        ledger._group_commit.budgets._rows["INSERT INTO no_such_table VALUES (1)"] = [()]
        with pytest.raises(ApiError) as caught:
            await ledger.reserve(holder(1000), "b", "Org/M", 100)
        assert caught.value.status == 503
        await reservation.settle(3, 4)
        await (await ledger.reserve(holder(1000), "c", "Org/M", 100)).settle(1, 1)
        assert await states(url) == ["settled", "settled"]
        assert await spent(url) == await charged(url) == 9


async def test_reservations_are_rejected_with_503_while_the_database_is_stopped():
    with running_postgres() as server:
        url = server.new_database()
        async with running(url) as [ledger]:
            reservation = await ledger.reserve(holder(1000), "a", "Org/M", 100)
            server.stop()
            settling = asyncio.create_task(reservation.settle(3, 4))
            beyond_the_lease = await try_reserve(ledger, holder(100_000), 90_000)
            assert isinstance(beyond_the_lease, ApiError) and beyond_the_lease.status == 503
            await eventually(lambda: not ledger.available)
            with pytest.raises(ApiError) as caught:
                await ledger.reserve(holder(1000), "b", "Org/M", 100)
            assert (caught.value.status, caught.value.code) == (503, "service_unavailable")
            assert caught.value.retry_after == 5
            assert not settling.done()
            server.start()
            await settling
            assert await spent(url) == await charged(url) == 7
            await (await ledger.reserve(holder(1000), "c", "Org/M", 100)).settle(1, 0)
        assert await states(url) == ["settled", "settled"]


async def test_batch_whose_database_response_is_lost_is_written_once(url: str):
    async with running(url, shared=True) as [ledger]:
        reservation = await ledger.reserve(holder(1000), "a", "Org/M", 100)
        gateway_ids = await rows(url, "SELECT id FROM gateways")
        write = ledger._database.write

        async def write_and_lose_the_response(guard: tuple[str, Args], steps: Sequence[Step]) -> bool:
            await write(guard, steps)
            ledger._database.write = write
            raise DatabaseError("the connection was lost")

        ledger._database.write = write_and_lose_the_response
        await reservation.settle(10, 20)
        ledger._database.write = write_and_lose_the_response
        outcome = await try_reserve(ledger, holder(1000), 100)
        assert isinstance(outcome, ApiError) and outcome.status == 503
        await eventually(lambda: ledger.available and ledger.open == 0)
        assert await states(url) == ["settled", "released"]
        assert await spent(url) == await charged(url) == 30
        assert await rows(url, "SELECT id FROM gateways") == gateway_ids
