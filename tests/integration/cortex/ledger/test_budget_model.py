"""Random histories of requests: the ledger decides and charges as a simple model does."""

import asyncio
import itertools
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cortex.ledger.ledger_helpers import Clock, charged, holder, retire_gateways, running, spent, try_reserve
from helexa.cortex.access.keys import Principal, Window
from helexa.cortex.ledger.leases_windows_and_over_budget import Reservation
from helexa.cortex.ledger.ledger import Ledger
from nightly import cases

tokens = st.integers(1, 60)
steps = st.one_of(
    st.tuples(st.just("reserve"), tokens),
    st.tuples(st.just("settle"), st.integers(0, 5), st.integers(0, 90)),
    st.tuples(st.just("release"), st.integers(0, 5)),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 1.5, 29.5, 61.0])),
    st.tuples(st.just("cap"), st.one_of(st.none(), st.integers(0, 200))),
)


@dataclass
class ModelKey:
    """Model of one key's budget: a straightforward implementation of the documented rules."""

    cap: int | None
    seconds: int
    started: int | None = None
    spent: dict[int | None, int] = field(default_factory=dict)
    reserved: dict[int | None, int] = field(default_factory=dict)

    def reserve(self, tokens: int, now: float) -> bool:
        if self.seconds and (self.started is None or now >= self.started + self.seconds):
            self.started = int(now)
        left = (self.cap or 0) - self.spent.get(self.started, 0) - self.reserved.get(self.started, 0)
        if self.cap is not None and tokens > left:
            return False
        self.reserved[self.started] = self.reserved.get(self.started, 0) + tokens
        return True

    def close(self, window: int | None, tokens: int, used: int) -> None:
        self.reserved[window] -= tokens
        self.spent[window] = self.spent.get(window, 0) + used


def test_ledger_agrees_with_a_reference_model_for_random_request_histories(url: str):
    clock, numbers = Clock(), itertools.count()
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        (ledger,) = runner.run(stack.enter_async_context(running(url, clock=clock)))

        @settings(max_examples=cases(60, 1000), deadline=None, derandomize=True)
        @given(st.one_of(st.none(), st.integers(0, 200)), st.sampled_from([0, 60]), st.lists(steps, max_size=25))
        def matches_model(cap: int | None, seconds: int, history: list[tuple]):
            window = Window("rolling", seconds) if seconds else Window()
            key = holder(cap, f"key-{next(numbers)}", window)
            runner.run(_play(ledger, clock, key, ModelKey(cap, seconds), history, url))

        matches_model()
        runner.run(stack.aclose())


async def _play(ledger: Ledger, clock: Clock, key: Principal, model: ModelKey, history: list[tuple], url: str) -> None:
    open_: list[tuple[Reservation, int | None]] = []
    for step, *args in history:
        if step == "reserve":
            outcome = await try_reserve(ledger, key, args[0])
            assert isinstance(outcome, Reservation) == model.reserve(args[0], clock.now)
            if isinstance(outcome, Reservation):
                open_.append((outcome, model.started))
        elif step == "wait":
            clock.now += args[0]
            ledger._group_commit.wake(tidy=True)
        elif step == "cap":
            key, model.cap = replace(key, hard_cap=args[0]), args[0]
        elif open_:
            reservation, window = open_.pop(args[0] % len(open_))
            used = args[1] if step == "settle" else 0
            await (reservation.settle(used // 2, used - used // 2) if step == "settle" else reservation.release())
            model.close(window, reservation.tokens, used)
    for reservation, window in open_:
        await reservation.settle(1, 0)
        model.close(window, reservation.tokens, 1)
    assert await spent(url, key.key_id) == await charged(url, key.key_id) == sum(model.spent.values())


at_any_gateway = st.one_of(
    st.tuples(st.just("reserve"), tokens, st.integers(0, 2)),
    st.tuples(st.just("settle"), st.integers(0, 5), st.integers(0, 60)),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 1.5])),
    st.tuples(st.just("cap"), st.integers(0, 200)),
    st.tuples(st.just("sweep"), st.integers(1, 3)),
)


def test_several_gateways_together_never_exceed_the_cap_of_a_key(url: str):
    clock, numbers = Clock(), itertools.count()
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        ledgers = runner.run(stack.enter_async_context(running(url, count=3, clock=clock)))

        @settings(max_examples=cases(20, 300), deadline=None, derandomize=True)
        @given(st.lists(at_any_gateway, max_size=25))
        def matches_model(history: list[tuple]):
            runner.run(_play_together(ledgers, clock, holder(200, f"key-{next(numbers)}"), history, url))

        matches_model()
        runner.run(stack.aclose())


async def _play_together(ledgers: list[Ledger], clock: Clock, key: Principal, history: list[tuple], url: str) -> None:
    open_: list[Reservation] = []
    paid = 0
    for step, *args in history:
        if step == "reserve":
            outcome = await try_reserve(ledgers[args[1]], key, args[0])
            if isinstance(outcome, Reservation):
                open_.append(outcome)
                assert paid + sum(reservation.tokens for reservation in open_) <= key.hard_cap
        elif step == "wait":
            clock.now += args[0]
            for ledger in ledgers:
                ledger._group_commit.wake(tidy=True)
        elif step == "cap":
            key = replace(key, hard_cap=args[0])
        elif step == "sweep":  # marks running gateways as dead
            await retire_gateways(url, args[0])
        elif open_:
            reservation = open_.pop(args[0] % len(open_))
            used = min(args[1], reservation.tokens)
            await reservation.settle(used, 0)
            paid += used
    await asyncio.gather(*(reservation.release() for reservation in open_))
    assert await spent(url, key.key_id) == await charged(url, key.key_id) == paid
