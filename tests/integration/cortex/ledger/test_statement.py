"""The budget statement of a key, and the charge of an orphaned reservation."""

from dataclasses import replace

from cortex.ledger.ledger_helpers import Clock, holder, kill, retire_gateways, running
from helexa.cortex.access.keys import Principal, Window
from helexa.cortex.ledger.ledger import Ledger
from helexa.cortex.ledger.reservations_in_memory import Budget
from helexa.cortex.ledger.storage import open_database


async def use(ledger: Ledger, principal: Principal, model: str, prompt: int, completion: int) -> None:
    await (await ledger.reserve(principal, "r", model, 1000)).settle(prompt, completion)


async def test_reservation_of_a_killed_gateway_is_charged_completely(url: str):
    async with running(url, clock=Clock()) as [ledger]:
        await ledger.reserve(Principal("a", "alice"), "r", "M", 1000)
        await kill(ledger)
        await retire_gateways(url)
        database = await open_database(url)
        try:
            rows = await database.fetch("SELECT account_id, key_id, model, state, charged FROM entries")
        finally:
            await database.close()
    assert [tuple(row.values()) for row in rows] == [("a", "alice", "M", "orphaned", 1000)]


async def test_budget_of_a_key_includes_the_usage_at_all_gateways(url: str):
    clock, rolling = Clock(), holder(10_000, "rolling", Window("rolling", 60))
    async with running(url, count=2, clock=clock) as [ledger_a, ledger_b]:
        assert await ledger_a.budget(holder(10_000)) == await ledger_a.budget(rolling) == Budget(0, 0, None)
        for ledger in (ledger_a, ledger_b):
            await use(ledger, holder(10_000), "M", 10, 0)
            await use(ledger, rolling, "M", 20, 0)
        reservation = await ledger_a.reserve(holder(10_000), "r", "M", 1000)
        budget = await ledger_b.budget(holder(10_000))
        assert (budget.spent, budget.ends_at) == (20, None)
        assert 1000 <= budget.held <= 10_000 - 20
        budget = await ledger_b.budget(rolling)
        assert (budget.spent, budget.ends_at) == (40, 1_700_000_060)
        await reservation.release()
        await assert_budgets_agree(ledger_b, holder(10_000), rolling, holder(5, "unused"))
        clock.now += 60
        assert await ledger_a.budget(rolling) == Budget(0, 0, None)
        await assert_budgets_agree(ledger_a, holder(10_000), rolling, replace(rolling, window=Window()))
        await use(ledger_a, rolling, "M", 5, 0)
        await assert_budgets_agree(ledger_a, rolling)


async def assert_budgets_agree(ledger: Ledger, *principals: Principal) -> None:
    for principal in principals:
        assert await ledger.budgets([principal]) == {principal.key_id: await ledger.budget(principal)}
