"""What was spent, by day, account, key and model."""

import asyncio
from datetime import date

from cortex.ledger.running import Clock, holder, kill, running, sweep
from helexa.cortex.access.principal import Principal, Window
from helexa.cortex.ledger.backends import open_database
from helexa.cortex.ledger.ledger import Ledger
from helexa.cortex.ledger.statement import Budget, Spend, spend

DAY = date(2023, 11, 14)  # of the clock's first moment, 22:13 UTC
NEXT = date(2023, 11, 15)


async def use(ledger: Ledger, principal: Principal, model: str, prompt: int, completion: int, cached: int = 0) -> None:
    await (await ledger.reserve(principal, "r", model, 1000)).settle(prompt, completion, cached=cached)


async def spent(ledger: Ledger, url: str, since: date, until: date, account_id: str | None = None) -> list[Spend]:
    await ledger.flush()
    database = await open_database(url)
    try:
        return await spend(database, since, until, account_id)
    finally:
        await database.close()


async def test_spend_is_summed_by_day_account_key_and_model(url: str):
    clock, alice, bob = Clock(), Principal("a", "alice"), Principal("b", "bob")
    async with running(url, clock=clock) as [ledger]:
        await asyncio.gather(
            use(ledger, alice, "M", 10, 5, cached=8), use(ledger, alice, "M", 1, 2), use(ledger, alice, "N", 3, 0)
        )
        await use(ledger, bob, "M", 7, 7)
        await (await ledger.reserve(bob, "r", "M", 1000)).release()
        running_still = await ledger.reserve(bob, "r", "M", 1000)
        clock.now += 2 * 3600
        await use(ledger, alice, "M", 100, 0)
        assert await spent(ledger, url, DAY, DAY) == [
            Spend(DAY, "a", "alice", "M", 2, 11, 7, 8, 18),
            Spend(DAY, "a", "alice", "N", 1, 3, 0, 0, 3),
            Spend(DAY, "b", "bob", "M", 1, 7, 7, 0, 14),
        ]
        assert await spent(ledger, url, NEXT, NEXT) == [Spend(NEXT, "a", "alice", "M", 1, 100, 0, 0, 100)]
        assert [one.day for one in await spent(ledger, url, DAY, NEXT, "a")] == [DAY, DAY, NEXT]
        assert await spent(ledger, url, DAY, NEXT, "nobody") == []
        await running_still.settle(1, 1)
        (_, _, of_bob) = await spent(ledger, url, DAY, DAY)
        assert (of_bob.requests, of_bob.charged) == (2, 16)


async def test_an_orphan_is_charged_what_it_reserved(url: str):
    async with running(url, clock=Clock()) as [ledger]:
        await ledger.reserve(Principal("a", "alice"), "r", "M", 1000)
        await kill(ledger)
        await sweep(url)
        assert await spent(ledger, url, DAY, DAY) == [Spend(DAY, "a", "alice", "M", 1, 0, 0, 0, 1000)]


async def test_a_budget_says_what_is_spent_and_held_by_all(url: str):
    clock, rolling = Clock(), holder(10_000, "rolling", Window("rolling", 60))
    async with running(url, count=2, clock=clock) as [one, other]:
        assert await one.budget(holder(10_000)) == await one.budget(rolling) == Budget(0, 0, None)
        for ledger in (one, other):
            await use(ledger, holder(10_000), "M", 10, 0)
            await use(ledger, rolling, "M", 20, 0)
        reservation = await one.reserve(holder(10_000), "r", "M", 1000)
        budget = await other.budget(holder(10_000))
        assert (budget.spent, budget.ends_at) == (20, None)
        assert 1000 <= budget.held <= 10_000 - 20
        budget = await other.budget(rolling)
        assert (budget.spent, budget.ends_at) == (40, 1_700_000_060)
        await reservation.release()
        clock.now += 60
        assert await one.budget(rolling) == Budget(0, 0, None)
