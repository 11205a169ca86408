"""Sums of charges by day, key and model, on SQLite and PostgreSQL."""

import pytest

from cortex.ledger import ledger_helpers
from helexa.cortex.access.keys import Principal
from helexa.cortex.ledger import activity_and_usage_totals
from helexa.cortex.ledger.ledger import Ledger

DAY = 86_400
ALICE, BOB = Principal("a", "alice"), Principal("b", "bob")


async def use(ledger: Ledger, principal: Principal, model: str, prompt: int, completion: int) -> None:
    await (await ledger.reserve(principal, "r", model, 1000)).settle(prompt, completion)


async def test_charges_are_summed_by_the_chosen_columns(url: str) -> None:
    clock = ledger_helpers.Clock()
    async with ledger_helpers.running(url, clock=clock) as [ledger]:
        today = int(clock.now) // DAY
        await use(ledger, ALICE, "M", 10, 5)
        await use(ledger, ALICE, "M", 20, 0)
        await use(ledger, BOB, "N", 7, 1)
        await (await ledger.reserve(BOB, "r", "M", 1000)).release()
        running = await ledger.reserve(BOB, "r", "M", 1000)
        clock.now += DAY
        await use(ledger, ALICE, "N", 1, 1)
        days = range(today, today + 2)

        by_key = await ledger.charges(days, ["key_id"])
        assert [(row["key_id"], row["requests"], row["prompt"], row["completion"]) for row in by_key] == [
            ("alice", 3, 31, 6),
            ("bob", 1, 7, 1),
        ]
        by_day = await ledger.charges(days, ["day", "model"])
        assert [(row["day"], row["model"], row["charged"]) for row in by_day] == [
            ("2023-11-14", "M", 35),
            ("2023-11-14", "N", 8),
            ("2023-11-15", "N", 2),
        ]
        by_hour = await ledger.charges(days, ["hour"])
        assert [(row["hour"], row["requests"]) for row in by_hour] == [
            ("2023-11-14T22:00:00Z", 3),
            ("2023-11-15T22:00:00Z", 1),
        ]
        [total] = await ledger.charges(range(today + 1, today + 2), [], account_id="a")
        assert (total["requests"], total["charged"]) == (1, 2)
        assert await ledger.charges(days, ["model"], key_id="nobody") == []
        await running.release()


async def test_query_of_charges_stops_soon_after_the_row_limit(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_and_usage_totals, "MAX_CHARGE_ROWS", 1)
    clock = ledger_helpers.Clock()
    async with ledger_helpers.running(url, clock=clock) as [ledger]:
        for model in ("M", "N", "O"):
            await use(ledger, ALICE, model, 1, 1)
        today = int(clock.now) // DAY
        assert len(await ledger.charges(range(today, today + 1), ["model"])) > 1


async def test_query_of_charges_grouped_by_an_unknown_column_is_rejected(url: str) -> None:
    async with ledger_helpers.running(url) as [ledger]:
        for groups, filters in ((["node"], {}), ([], {"node": "n"})):
            with pytest.raises(ValueError, match="node"):
                await ledger.charges(range(1), groups, **filters)
