"""Reserve, settle and release: reserved tokens, charges and rejections."""

import asyncio

import pytest

from cortex.ledger.ledger_helpers import Clock, charged, holder, rows, running, spent, states, try_reserve
from cortex.running_gateway import eventually
from helexa.core.errors import ApiError, HelexaError
from helexa.cortex.access.keys import Window
from helexa.cortex.ledger.leases_windows_and_over_budget import Reservation


async def test_reserve_and_settle_return_only_after_their_database_row_is_written(url: str):
    async with running(url) as [ledger]:
        reservation = await ledger.reserve(holder(), "req-1", "Org/M", 60)
        assert await rows(
            url, "SELECT request_id, model, key_id, account_id, state, reserved, charged FROM entries"
        ) == [
            {
                "request_id": "req-1",
                "model": "Org/M",
                "key_id": "key",
                "account_id": "account",
                "state": "reserved",
                "reserved": 60,
                "charged": 0,
            }
        ]
        await reservation.settle(20, 10, cached=5, node="beast", estimated=True)
        columns = "state, charged, prompt, completion, cached, node, estimated"
        (row,) = await rows(url, f"SELECT {columns} FROM entries")
        assert list(row.values()) == ["settled", 30, 20, 10, 5, "beast", 1]
        assert await spent(url) == 30
        assert ledger.open == 0


async def test_reserved_and_spent_tokens_cannot_be_reserved_again(url: str):
    async with running(url) as [ledger]:
        first = await ledger.reserve(holder(), "a", "Org/M", 60)
        with pytest.raises(ApiError) as caught:
            await ledger.reserve(holder(), "b", "Org/M", 41)
        assert caught.value.code == "insufficient_quota"
        second = await ledger.reserve(holder(), "c", "Org/M", 40)
        await first.settle(10, 0)
        await second.release()
        assert isinstance(await try_reserve(ledger, holder(), 91), ApiError)
        assert isinstance(await try_reserve(ledger, holder(), 90), Reservation)
    assert await states(url) == ["settled", "released", "orphaned"]
    assert await spent(url) == await charged(url) == 100


async def test_token_usage_above_the_reservation_is_charged_completely(url: str):
    async with running(url) as [ledger]:
        reservation = await ledger.reserve(holder(), "a", "Org/M", 10)
        await reservation.settle(90, 30)
        assert await spent(url) == 120
        assert isinstance(await try_reserve(ledger, holder(), 1), ApiError)
        assert isinstance(await try_reserve(ledger, holder(121), 1), Reservation)


async def test_usage_before_a_key_gets_a_cap_counts_toward_the_cap(url: str):
    async with running(url) as [ledger]:
        for _ in range(3):
            await (await ledger.reserve(holder(None), "a", "Org/M", 10**9)).settle(20, 10)
        assert await spent(url) == await charged(url) == 90
        assert isinstance(await try_reserve(ledger, holder(100), 11), ApiError)
        reservation = await ledger.reserve(holder(100), "a", "Org/M", 10)
        assert isinstance(await try_reserve(ledger, holder(100), 1), ApiError)
        await reservation.release()


async def test_released_tokens_above_a_lowered_cap_are_not_available_again(url: str):
    async with running(url) as [ledger]:
        reservations = [await ledger.reserve(holder(100), "a", "Org/M", 20) for _ in range(5)]
        assert isinstance(await try_reserve(ledger, holder(50), 1), ApiError)
        for reservation in reservations[:2]:
            await reservation.release()
        assert isinstance(await try_reserve(ledger, holder(50), 1), ApiError)
        await reservations[2].settle(5, 0)
        assert isinstance(await try_reserve(ledger, holder(50), 6), ApiError)
        assert isinstance(await try_reserve(ledger, holder(50), 5), Reservation)


async def test_tokens_reserved_by_one_key_do_not_reduce_the_budget_of_another_key(url: str):
    async with running(url) as [ledger]:
        outcomes = await asyncio.gather(*(try_reserve(ledger, holder(100, f"key-{n}"), 100) for n in range(20)))
        assert all(isinstance(outcome, Reservation) for outcome in outcomes)


async def test_only_the_first_settle_or_release_of_a_reservation_counts(url: str):
    async with running(url) as [ledger]:
        reservation = await ledger.reserve(holder(), "a", "Org/M", 50)
        await asyncio.gather(reservation.settle(7, 0), reservation.settle(9, 9), reservation.release())
        await reservation.settle(9, 9)
        released = await ledger.reserve(holder(), "a", "Org/M", 50)
        await released.release()
        await released.settle(9, 9)
        assert await states(url) == ["settled", "released"]
        assert await spent(url) == await charged(url) == 7


async def test_reservation_is_released_if_its_context_ends_without_a_settlement(url: str):
    async with running(url) as [ledger]:
        with pytest.raises(KeyError):
            async with await ledger.reserve(holder(), "a", "Org/M", 50):
                raise KeyError
        async with await ledger.reserve(holder(), "b", "Org/M", 50) as reservation:
            await reservation.settle(1, 2)
        assert await states(url) == ["released", "settled"]


async def test_rolling_budget_window_starts_at_its_first_reservation(url: str):
    clock, key = Clock(), holder(100, window=Window("rolling", 60))
    async with running(url, clock=clock) as [ledger]:
        late = await ledger.reserve(key, "late", "Org/M", 30)
        await (await ledger.reserve(key, "a", "Org/M", 70)).settle(70, 0)
        clock.now += 48.5
        with pytest.raises(ApiError) as caught:
            await ledger.reserve(key, "b", "Org/M", 1)
        assert (caught.value.code, caught.value.retry_after) == ("rate_limit_exceeded", 12)
        assert (await ledger.budget(key)).ends_at == 1_700_000_060
        clock.now += 11.5
        assert (await ledger.budget(key)).spent == 0
        clock.now += 1000
        await (await ledger.reserve(key, "c", "Org/M", 100)).settle(40, 0)
        await late.settle(25, 0)  # charged to the window of the reservation
        assert (await ledger.budget(key)).spent == 40
        assert isinstance(await try_reserve(ledger, key, 61), ApiError)
    windows = await rows(url, "SELECT window_id, spent FROM windows ORDER BY window_id")
    assert [tuple(row.values()) for row in windows] == [(0, 0), (1_700_000_000, 95), (1_700_001_060, 40)]


async def test_budget_window_started_by_a_clock_that_was_ahead_does_not_lock_the_key(url: str):
    clock, key = Clock(), holder(100, window=Window("rolling", 3600))
    async with running(url, clock=clock) as [ledger]:
        clock.now += 86_400
        await (await ledger.reserve(key, "a", "Org/M", 100)).settle(100, 0)
        clock.now -= 86_400
        assert (await ledger.budget(key)).spent == 0
        assert (await ledger.budgets([key]))["key"].spent == 0
        await (await ledger.reserve(key, "b", "Org/M", 60)).settle(60, 0)
        with pytest.raises(ApiError) as caught:
            await ledger.reserve(key, "c", "Org/M", 41)
        assert caught.value.retry_after == 3600
    windows = await rows(url, "SELECT window_id, spent FROM windows WHERE window_id > 0 ORDER BY window_id")
    assert [tuple(row.values()) for row in windows] == [(1_700_000_000, 60), (1_700_086_400, 100)]


async def test_lease_taken_while_the_clock_was_ahead_is_not_used(url: str):
    clock, key = Clock(), holder(100, window=Window("rolling", 3600))
    async with running(url, clock=clock) as [ledger]:
        clock.now += 86_400
        await (await ledger.reserve(key, "a", "Org/M", 10)).settle(10, 0)
        clock.now -= 86_400
        await (await ledger.reserve(key, "b", "Org/M", 1)).settle(1, 0)
        assert (await ledger.budget(key)).spent == 1


async def test_lease_of_an_idle_key_shrinks_and_is_then_deleted(url: str):
    clock = Clock()
    async with running(url, count=2, clock=clock) as [ledger, other_ledger]:
        await (await ledger.reserve(holder(10_000), "a", "Org/M", 100)).settle(100, 0)
        assert (await ledger.budget(holder())).held > 0
        clock.now += 1.0

        async def lease_shrank() -> bool:
            return (await ledger.budget(holder())).held == 0

        await eventually(lease_shrank)
        assert isinstance(await try_reserve(other_ledger, holder(10_000), 9_901), ApiError)
        last = await other_ledger.reserve(holder(10_000), "b", "Org/M", 9_900)
        await last.release()
        clock.now += 60.0

        async def lease_deleted() -> bool:
            return await rows(url, "SELECT * FROM leases") == []

        await eventually(lease_deleted)
        assert await spent(url) == 100
        assert isinstance(await try_reserve(ledger, holder(10_000), 9_900), Reservation)


async def test_ledger_entry_values_too_large_for_their_columns_are_clamped(url: str):
    async with running(url) as [ledger]:
        reservation = await ledger.reserve(holder(None), "a\0\ud800" + "x" * 999, "Org/M", -5)
        await reservation.settle(-1, 10**30, node="n\0ode")
        (row,) = await rows(url, "SELECT request_id, reserved, charged, node FROM entries")
        assert (row["reserved"], row["charged"], row["node"]) == (1, 1 << 31, "node")
        assert row["request_id"].startswith("a?x") and len(row["request_id"]) < 201


async def test_reservation_beyond_the_limit_of_waiting_reservations_gets_503(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("helexa.cortex.ledger.ledger.MAX_WAITING", 5)
    async with running(url) as [ledger]:
        outcomes = await asyncio.gather(*(try_reserve(ledger, holder(None), 1) for _ in range(8)))
        errors = [outcome for outcome in outcomes if isinstance(outcome, ApiError)]
        assert [(error.status, error.code, error.retry_after) for error in errors] == [
            (503, "rate_limit_exceeded", 1)
        ] * 3


async def test_canceled_call_of_reserve_holds_no_tokens(url: str):
    async with running(url) as [ledger]:
        for steps in range(60):
            tasks = [asyncio.create_task(ledger.reserve(holder(), "a", "Org/M", 10)) for _ in range(3)]
            for _ in range(steps):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, Reservation):
                    outcome.abandon()
        await eventually(lambda: ledger.open == 0)
        await (await ledger.reserve(holder(), "a", "Org/M", 100)).release()
        assert set(await states(url)) == {"released"}
        assert await spent(url) == 0


async def test_reservation_is_settled_although_the_caller_of_settle_is_cancelled(url: str):
    async with running(url) as [ledger]:
        for _ in range(10):
            reservation = await ledger.reserve(holder(None), "a", "Org/M", 10)
            task = asyncio.create_task(reservation.settle(3, 4))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: ledger.open == 0)
    assert await spent(url) == await charged(url) == 70


async def test_closed_ledger_rejects_reservations_and_ignores_settlements(url: str):
    async with running(url) as [ledger]:
        reservation = await ledger.reserve(holder(), "a", "Org/M", 10)
        await ledger.close()
        with pytest.raises(ApiError) as caught:
            await ledger.reserve(holder(), "b", "Org/M", 10)
        assert caught.value.code == "shutting_down"
        await reservation.settle(1, 1)
        assert await states(url) == ["orphaned"]
        assert await spent(url) == 10


async def test_second_gateway_on_one_sqlite_file_is_rejected(tmp_path):
    url = f"sqlite:{tmp_path / 'cortex.db'}"
    async with running(url):
        with pytest.raises(HelexaError, match="another gateway uses the ledger"):
            async with running(url):
                pass
    async with running(url) as [ledger]:
        await (await ledger.reserve(holder(), "a", "Org/M", 10)).release()
