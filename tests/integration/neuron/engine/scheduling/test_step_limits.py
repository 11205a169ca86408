"""Step limits of one principal: step duration, and prompt tokens in steps with decode rows."""

import random
from pathlib import Path

import pytest
from scheduler_runs import generate, scheduler_of

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.scheduling.step_limits_and_fair_share import StepController, StepLimits

ROWS = 8
LIMIT = 4.0  # a hang limit of 4 s, of which one step may take 0.5 s


def bounded(token_seconds: float = 0.0, most: int = 512, limit: float = LIMIT) -> StepController:
    return StepController(EngineOptions(max_step_tokens=most), limit, token_seconds)


def finish(controller: StepController, prompt_tokens: int, seconds: float, rows: int = 0) -> None:
    controller.learn(rows, {"": prompt_tokens} if prompt_tokens else {}, seconds)


def mixed(controller: StepController, rows: int = ROWS, width: int = ROWS) -> int:
    """Return the number of prompt tokens in the next step with `rows` decode rows."""
    return controller.prompt_tokens(rows, rows, width, StepLimits())


def trained(most: int, decode: float, token: float, steps: int = 60) -> StepController:
    """Return a controller that has measured `steps` steps of `decode` seconds plus `token` seconds per prompt token."""
    controller = StepController(EngineOptions(max_prefill_beside_decode=most))
    for _ in range(steps):
        finish(controller, 0, decode, ROWS)
        finish(controller, mixed(controller), decode + mixed(controller) * token, ROWS)
    return controller


def test_prompt_tokens_per_step_are_limited_by_max_step_tokens_if_tokens_are_fast() -> None:
    controller = bounded(0.0009)
    assert controller.max_prompt_tokens == 512
    finish(controller, 512, 0.45)
    assert controller.max_prompt_tokens == 512


def test_initial_prompt_tokens_per_step_follow_the_estimated_time_per_token() -> None:
    assert bounded(0.005).max_prompt_tokens == 64
    assert bounded().max_prompt_tokens == 512
    assert StepController(EngineOptions()).max_prompt_tokens == 512


def test_measured_step_time_replaces_the_initial_estimate() -> None:
    controller = bounded(0.005)
    finish(controller, 64, 0.032)
    assert controller.max_prompt_tokens == 512


def test_one_slow_step_shrinks_the_next_four_steps() -> None:
    controller = bounded()
    finish(controller, 512, 5.0)
    assert controller.max_prompt_tokens == 32
    for _ in range(3):
        finish(controller, 32, 0.005)
        assert controller.max_prompt_tokens == 32
    finish(controller, 32, 0.005)
    assert controller.max_prompt_tokens == 512


def test_slow_steps_of_few_tokens_do_not_shrink_the_next_steps() -> None:
    controller = bounded()
    finish(controller, 512, 0.25)
    for _ in range(4):
        finish(controller, 3, 0.05)
    assert controller.max_prompt_tokens == 512


@pytest.mark.parametrize(("most", "tokens"), [(512, 16), (4, 4)])
def test_prompt_chunk_may_have_16_tokens_however_slow_prompt_tokens_are(most: int, tokens: int) -> None:
    controller = bounded(most=most)
    finish(controller, 1, 1e6)
    assert controller.max_prompt_tokens == tokens


def test_prompt_token_limit_is_unchanged_if_the_measured_speed_varies_a_little() -> None:
    draw = random.Random(1)
    controller = bounded(0.005)
    sizes = set()
    for _ in range(50):
        finish(controller, 64, 64 * draw.uniform(0.005, 0.0075))
        sizes.add(controller.max_prompt_tokens)
    assert sizes == {64}


@pytest.mark.parametrize(("token_seconds", "tokens"), [(1e-4, 512), (0.002, 128), (0.01, 32), (0.1, 32), (1.0, 16)])
def test_prompt_tokens_per_step_shrink_so_that_a_step_stays_short(token_seconds: float, tokens: int) -> None:
    controller = bounded(limit=160.0)
    finish(controller, 512, 512 * token_seconds)
    assert controller.max_prompt_tokens == tokens


def test_scheduler_cuts_prompts_by_measured_time() -> None:
    scheduler = Scheduler(EngineOptions(speculation=False), PagePool(200, 64), controller=bounded())
    request = Generate(id=1, prompt=[1] * 5000, max_tokens=1, sampling=SamplingParams())
    scheduler.add(Sequence(request))
    sizes = []
    for seconds in (0.05, 5.0, 0.25, 0.25, 0.25, 0.025, 0.025):
        plan = scheduler.plan()
        sizes.append(sum(entry.count for entry in plan))
        scheduler.commit(plan, [], seconds)
    assert sizes == [512, 512, 32, 32, 32, 32, 64]


def test_generated_tokens_do_not_depend_on_the_sizes_of_the_steps(smollm2_gguf: Path) -> None:
    runner = load_once(smollm2_gguf, EngineOptions(kv_cache_mb=64))
    prompts = [[1000 + 7 * number for number in range(length)] for length in (300, 70, 5)]

    def outputs(seconds: float) -> list[list[int]]:
        """Return the output tokens if the controller estimates `seconds` per token."""
        scheduler = scheduler_of(runner)
        controller = bounded(seconds)
        controller.learn = lambda rows, prompts, seconds: None  # type: ignore[method-assign]
        scheduler.planner._controller = controller
        return generate(runner, scheduler, prompts, max_tokens=12)

    assert outputs(0.0) == outputs(0.005) == outputs(10.0)


def test_step_with_prompt_tokens_takes_at_most_twice_as_long_as_a_decode_step() -> None:
    assert mixed(trained(most=128, decode=0.010, token=0.0005)) == 24  # rounded so that a step has 8 n rows


def test_prompt_tokens_beside_decoding_stay_between_8_and_max_step_tokens() -> None:
    assert mixed(trained(most=128, decode=0.010, token=0.1)) == 8
    assert mixed(trained(most=128, decode=0.010, token=1e-6)) == 128
    assert mixed(trained(most=4, decode=0.010, token=0.1)) == 4


def test_steps_with_decoding_get_fewer_prompt_tokens_if_prompt_tokens_become_slower() -> None:
    controller = trained(most=128, decode=0.010, token=0.0003)
    shallow = mixed(controller)
    for _ in range(30):
        finish(controller, mixed(controller), 0.010 + mixed(controller) * 0.0010, ROWS)
    assert mixed(controller) < shallow / 2


def test_some_steps_omit_prompt_tokens_to_measure_the_decode_time_again() -> None:
    controller = trained(most=128, decode=0.010, token=0.0005)
    tokens: list[int] = []
    for _ in range(200):  # decode steps now take four times as long
        tokens.append(mixed(controller))
        finish(controller, tokens[-1], 0.040 + tokens[-1] * 0.0005, ROWS)
    assert 3 <= tokens.count(0) <= 8
    assert tokens[-1] > 2 * tokens[0]


def test_prompt_token_limit_follows_the_estimated_time_of_a_full_decode_batch() -> None:
    controller = StepController(EngineOptions(max_prefill_beside_decode=512))
    for rows in (1, 2, 4, 8) * 20:
        finish(controller, 0, 0.010 + rows * 0.001, rows)
        finish(controller, 20, 0.010 + rows * 0.001 + 20 * 0.0005, rows)
    assert mixed(controller, 8, 8) == pytest.approx(36, abs=4)
    assert mixed(controller, 8, 32) == pytest.approx((2 * 0.042 - 0.018) / 0.0005, abs=4)


def test_limit_of_prompt_tokens_beside_decoding_starts_at_32() -> None:
    controller = StepController(EngineOptions())
    assert mixed(controller) == 32
    finish(controller, 16, 1.0, ROWS)  # no decode-only step was measured
    assert mixed(controller) == 32


def test_step_without_decoding_sequences_uses_the_full_token_budget() -> None:
    assert StepController(EngineOptions()).prompt_tokens(0, 0, 5, StepLimits()) == 512
    assert StepController(EngineOptions(max_prefill_beside_decode=0)).prompt_tokens(9, 9, 9, StepLimits()) == 503


def test_step_sizes_with_fixed_step_timing_do_not_depend_on_measured_times() -> None:
    quick, slow = (StepController(EngineOptions(step_timing="fixed"), LIMIT, seconds) for seconds in (0.0, 1.0))
    for rows in (1, 2, 4, 8) * 20:
        for controller, seconds in ((quick, 0.001), (slow, 100.0)):
            finish(controller, 0, seconds, rows)
            finish(controller, 500, seconds, rows)
    assert quick.max_prompt_tokens == slow.max_prompt_tokens == 512
    assert mixed(quick) == mixed(slow) == 72
