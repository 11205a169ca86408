"""Steps with prompts, bounded by measured time."""

import random
from pathlib import Path

import pytest
from driving import generate, scheduler_of

from helexa.neuron.engine.load import load_once
from helexa.neuron.engine.messages import EngineOptions, Generate, SamplingParams
from helexa.neuron.engine.pages import PagePool
from helexa.neuron.engine.scheduler import Scheduler
from helexa.neuron.engine.sequence import Sequence
from helexa.neuron.engine.step_budget import StepBudget

LIMIT = 80.0  # a step may take 10 s


def bounded(token_seconds: float = 0.0, most: int = 512) -> StepBudget:
    """A budget that the time limit bounds alone."""
    return StepBudget(most, LIMIT, token_seconds, brief=float("inf"))


def test_fast_tokens_are_bounded_by_their_number_alone() -> None:
    budget = bounded(0.015)
    assert budget.tokens == 512
    budget.learn(512, 9.0)
    assert budget.tokens == 512


def test_an_unmeasured_engine_begins_with_what_one_token_took() -> None:
    assert bounded(0.1).tokens == 64
    assert bounded().tokens == 512
    assert StepBudget(512).tokens == 512


def test_a_measured_step_supersedes_the_first_estimate() -> None:
    budget = bounded(0.1)
    budget.learn(64, 0.64)
    assert budget.tokens == 512


def test_slow_steps_shrink_the_next_ones_at_once_and_are_forgotten_later() -> None:
    budget = bounded()
    budget.learn(512, 100.0)
    assert budget.tokens == 32
    for _ in range(3):
        budget.learn(32, 0.1)
        assert budget.tokens == 32
    budget.learn(32, 0.1)
    assert budget.tokens == 512


def test_short_steps_do_not_shrink_the_next_ones() -> None:
    budget = bounded()
    budget.learn(512, 5.0)
    for _ in range(4):
        budget.learn(3, 1.0)
    assert budget.tokens == 512


@pytest.mark.parametrize(("most", "tokens"), [(512, 16), (4, 4)])
def test_a_few_tokens_are_always_affordable(most: int, tokens: int) -> None:
    budget = bounded(most=most)
    budget.learn(1, 1e6)
    assert budget.tokens == tokens


def test_sizes_recur_while_the_speed_varies_a_little() -> None:
    draw = random.Random(1)
    budget = bounded(0.1)
    sizes = set()
    for _ in range(50):
        budget.learn(64, 64 * draw.uniform(0.1, 0.15))
        sizes.add(budget.tokens)
    assert sizes == {64}


@pytest.mark.parametrize(("token_seconds", "tokens"), [(1e-4, 512), (0.002, 128), (0.01, 32), (0.1, 32), (1.0, 16)])
def test_a_step_is_brief_as_long_as_it_has_more_than_a_few_tokens(token_seconds: float, tokens: int) -> None:
    budget = StepBudget(512, 160.0)
    budget.learn(512, 512 * token_seconds)
    assert budget.tokens == tokens


def test_the_scheduler_cuts_prompts_by_the_measured_time() -> None:
    scheduler = Scheduler(EngineOptions(speculation=False, max_step_tokens=512), PagePool(200, 64), budget=bounded())
    request = Generate(id=1, prompt=[1] * 5000, max_tokens=1, sampling=SamplingParams())
    scheduler.add(Sequence(request))
    sizes = []
    for seconds in (1.0, 100.0, 5.0, 5.0, 5.0, 0.5, 0.5):
        plan = scheduler.plan()
        sizes.append(sum(entry.count for entry in plan))
        scheduler.commit(plan, [], seconds)
    assert sizes == [512, 512, 32, 32, 32, 32, 64]


def test_the_tokens_do_not_depend_on_the_sizes_of_steps(smollm2_gguf: Path) -> None:
    runner = load_once(smollm2_gguf, EngineOptions(kv_cache_mb=64))
    prompts = [[1000 + 7 * number for number in range(length)] for length in (300, 70, 5)]

    def answers(seconds: float) -> list[list[int]]:
        """With steps as if a token took so many seconds."""
        scheduler = scheduler_of(runner)
        budget = bounded(seconds)
        budget.learn = lambda tokens, seconds: None  # type: ignore[method-assign]
        scheduler.planner._budget = budget
        return generate(runner, scheduler, prompts, max_tokens=12)

    assert answers(0.0) == answers(0.1) == answers(10.0)
