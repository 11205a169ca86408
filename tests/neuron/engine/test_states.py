"""Recurrent state, on a simulation that knows what every state has seen: snapshots, reuse, preemption, drafts."""

import random

import pytest
from simulation import SimulatedCache

from helexa.neuron.engine.ipc.messages import EngineOptions, Generate, SamplingParams
from helexa.neuron.engine.kv_cache.page_pool import PagePool
from helexa.neuron.engine.kv_cache.state_pool import StatePool
from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence

PAGE = 4


class Bench:
    """A scheduler with states over a simulated cache that says what it was asked before."""

    def __init__(self, *, pages: int = 200, snapshots: int = 50, period: int = 1000, **options: object) -> None:
        options = {"speculation": False, "max_sequences": 8} | options
        built = EngineOptions(**options)  # type: ignore[arg-type]
        self.states = StatePool(built.max_sequences, snapshots)
        self.scheduler = Scheduler(built, PagePool(pages, PAGE), self.states)
        self.cache = SimulatedCache(self.scheduler, lambda tokens: 500 + len(tokens) % period)
        self.plans: list[Plan] = []
        self.added = 0

    def add(self, prompt: list[int], max_tokens: int = 2, turn: int = 0, salt: str = "") -> Sequence:
        request = Generate(
            id=self.added,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0),
            turn=turn,
            salt=salt,
        )
        self.added += 1
        sequence = Sequence(request)
        assert self.scheduler.add(sequence) is None
        return sequence

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.plans.append(plan)
        assert len(self.plans) < 20_000, "this never ends"
        self.scheduler.commit(plan, self.cache.run(plan))
        self.scheduler.check_idle()

    def finish(self) -> None:
        while not self.scheduler.idle:
            self.step()

    def run(self, prompt: list[int], max_tokens: int = 2, turn: int = 0, salt: str = "") -> Sequence:
        sequence = self.add(prompt, max_tokens, turn, salt)
        self.finish()
        return sequence


def numbers(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_the_next_turn_goes_on_from_the_end_of_the_prompt() -> None:
    bench = Bench()
    first = bench.run(numbers(30), max_tokens=2)
    assert first.cached == 0
    assert bench.run([*first.tokens, *numbers(9, 900)]).cached == 7 * PAGE, "the prompt's last full page ends at 28"


def test_output_leaves_a_snapshot_that_follows_it() -> None:
    bench = Bench()
    first = bench.run(numbers(30), max_tokens=21)
    assert bench.states.snapshots == 2, "one at the prompt's end, one behind the output"
    assert bench.run([*first.tokens, 7, 8, 9]).cached == 48


def test_a_turn_said_anew_goes_on_from_before_it() -> None:
    bench = Bench()
    bench.run(numbers(40), turn=22)
    assert bench.run([*numbers(22), *numbers(20, 700)]).cached == 20
    assert bench.run(numbers(40), turn=22).cached == 36, "and the same prompt once more from its end"


def test_long_prompts_leave_snapshots_on_the_way() -> None:
    bench = Bench(pages=3000)
    bench.run(numbers(5000))
    assert bench.run([*numbers(4500), 9999]).cached == 4096
    assert bench.run([*numbers(2100), 9999]).cached == 2048


def test_pages_without_a_snapshot_are_computed_again() -> None:
    bench = Bench()
    bench.run(numbers(30))
    assert bench.run([*numbers(20), 777]).cached == 0


def test_snapshots_are_nobody_elses() -> None:
    bench = Bench()
    bench.run(numbers(30), salt="a")
    assert bench.run(numbers(30), salt="b").cached == 0
    assert bench.run(numbers(30), salt="a").cached == 28


def test_the_least_recently_used_snapshot_goes_first() -> None:
    bench = Bench(snapshots=2)
    for start in (0, 1000):
        bench.run(numbers(30, start), max_tokens=1)
    bench.run(numbers(30), max_tokens=1)
    bench.run(numbers(30, 2000), max_tokens=1)
    assert bench.run(numbers(30), max_tokens=1).cached == 28
    assert bench.run(numbers(30, 1000), max_tokens=1).cached == 0


def test_without_room_for_snapshots_everything_is_computed() -> None:
    bench = Bench(snapshots=0)
    bench.run(numbers(30))
    assert bench.run(numbers(30)).cached == 0


def test_drafts_that_were_right_are_computed_once_more_and_nothing_else_changes() -> None:
    prompt = [500 + n % 5 for n in range(43)]
    alone = Bench(period=5)
    expected = alone.run(prompt, max_tokens=40).tokens
    guessing = Bench(period=5, speculation=True)
    assert guessing.run(prompt, max_tokens=40).tokens == expected
    assert len(guessing.plans) < len(alone.plans) / 2
    assert max(entry.count for plan in guessing.plans[1:] for entry in plan) > 1, "a settled draft was never taken up"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("speculation", [False, True])
def test_states_are_right_under_pressure(seed: int, speculation: bool) -> None:
    """Few pages, few snapshots, prompts in common, cancellations: the simulation checks each state in each step."""
    rng = random.Random(seed)
    bench = Bench(
        pages=60, snapshots=5, period=6, speculation=speculation, max_step_tokens=24, max_sequences=4, max_waiting=99
    )
    stems = [numbers(rng.randint(10, 60), 1000 * n) for n in range(3)]
    running: list[Sequence] = []
    for _ in range(60):
        stem = rng.choice(stems)
        prompt = [*stem[: rng.randint(1, len(stem))], *(500 + n % 6 for n in range(rng.randint(0, 20)))]
        running.append(bench.add(prompt, rng.randint(1, 40), turn=rng.randint(0, len(prompt))))
        for _ in range(rng.randint(0, 8)):
            bench.step()
        if rng.random() < 0.2:
            bench.scheduler.cancel(rng.choice(running).id)
    bench.finish()
    assert bench.scheduler.queues.cached_tokens > 0
    taken = [bench.states.take() for _ in range(4)]
    assert sorted(taken) == [0, 1, 2, 3], "a live slot leaked"
    assert len({bench.states.reserve() for _ in range(5)} - {None}) == 5, "a snapshot's slot leaked"
