"""Scheduling does not change greedy tokens on the reference kernels, with random weights."""

from pathlib import Path

import pytest
from scheduler_runs import generate, recorded_preemptions, scheduler_of

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import SamplingParams
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.ops.kernel_header import PAGE_SIZE
from tiny_models import tiny_model

VOCABULARY = 512
# Artificial prompts of different lengths with a common start; page boundaries (64) fall inside and at the ends.
START = [504, 357, 282, 464, 314]
PROMPTS = [
    START + [(90 + 37 * n + 7 * i) % VOCABULARY for i in range(length)]
    for n, length in enumerate((0, 1, 12, 40, 58, 59, 60, 130))
]
TOKENS = 16


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A small Llama model in float32 that has three query heads per KV head, like SmolLM2."""
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_model(
        folder,
        model_type="llama",
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return load_once(folder, EngineOptions(dtype="float32", kv_cache_mb=16))


@pytest.fixture(scope="module")
def expected_tokens(runner: Runner) -> list[list[int]]:
    return [generate(runner, scheduler_of(runner), [prompt], TOKENS)[0] for prompt in PROMPTS]


def test_batch_of_eight_generates_the_same_tokens_as_single_prompts(
    runner: Runner, expected_tokens: list[list[int]]
) -> None:
    assert generate(runner, scheduler_of(runner), PROMPTS, TOKENS) == expected_tokens


def test_prefill_chunks_of_16_tokens_do_not_change_the_generated_tokens(
    runner: Runner, expected_tokens: list[list[int]]
) -> None:
    assert generate(runner, scheduler_of(runner, max_step_tokens=16), PROMPTS, TOKENS) == expected_tokens


def test_preemption_does_not_change_the_generated_tokens(
    runner: Runner, expected_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = recorded_preemptions(monkeypatch)
    scheduler = scheduler_of(runner, pages=7)
    assert generate(runner, scheduler, PROMPTS, TOKENS) == expected_tokens
    assert preempted, "the pool was too large to test preemption"
    resumed = [s for s in preempted if len(s.tokens) > PAGE_SIZE]
    assert resumed, "no preempted sequence had a full page to reuse"


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 16}, {"pages": 7}], ids=["plain", "chunked", "preempted"])
def test_overlapping_steps_do_not_change_the_generated_tokens(
    runner: Runner, expected_tokens: list[list[int]], options: dict[str, int]
) -> None:
    scheduler = scheduler_of(runner, **options)  # type: ignore[arg-type]
    assert generate(runner, scheduler, PROMPTS, TOKENS, overlap=True) == expected_tokens


def test_output_with_overlapping_steps_ends_at_the_stop_token(runner: Runner, expected_tokens: list[list[int]]) -> None:
    stop = expected_tokens[-1][TOKENS // 2]
    expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in expected_tokens]
    assert generate(runner, scheduler_of(runner), PROMPTS, TOKENS, stop_ids=[stop], overlap=True) == expected


def test_prefix_cache_hits_do_not_change_the_generated_tokens(runner: Runner, expected_tokens: list[list[int]]) -> None:
    scheduler = scheduler_of(runner)
    long = PROMPTS[-1]
    for prompt, tokens in zip(PROMPTS, expected_tokens, strict=True):
        assert generate(runner, scheduler, [prompt], TOKENS) == [tokens]
    cached = scheduler.queues.cached_tokens
    assert generate(runner, scheduler, PROMPTS, TOKENS) == expected_tokens
    assert scheduler.queues.cached_tokens - cached >= len(long) // PAGE_SIZE * PAGE_SIZE
    (turn,) = generate(runner, scheduler, [long + expected_tokens[-1] + START], TOKENS)
    assert generate(runner, scheduler_of(runner, prefix_reuse="off"), [long + expected_tokens[-1] + START], TOKENS) == [
        turn
    ]


def test_tokens_sampled_with_a_seed_do_not_depend_on_the_batch(runner: Runner) -> None:
    seeded = SamplingParams(temperature=0.7, top_p=0.9, seed=7)
    other_seed = SamplingParams(temperature=0.7, top_p=0.9, seed=8)
    (expected_tokens,) = generate(runner, scheduler_of(runner), [START], TOKENS, seeded)
    together = generate(runner, scheduler_of(runner, max_step_tokens=16), [START] * 4, TOKENS, seeded)
    assert together == [expected_tokens] * 4
    assert generate(runner, scheduler_of(runner), [START] * 4, TOKENS, seeded, overlap=True) == [expected_tokens] * 4
    assert generate(runner, scheduler_of(runner), [START], TOKENS, other_seed) != [expected_tokens]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0),
        SamplingParams(  # biased to two tokens, so that the output repeats itself
            temperature=0.8, top_p=0.9, repetition_penalty=1.05, seed=7, logit_bias=dict.fromkeys(START[:2], 20.0)
        ),
    ],
)
def test_speculative_decoding_does_not_change_the_generated_tokens(runner: Runner, sampling: SamplingParams) -> None:
    # Two prompts repeat themselves, the third does not.
    prompts = [START * 14, [*PROMPTS[5], *PROMPTS[5]], PROMPTS[3]]
    speculating, plain = scheduler_of(runner), scheduler_of(runner, speculation=False)
    drafted = 0
    plan_step = speculating.plan

    def spy() -> Plan:
        nonlocal drafted
        plan = plan_step()
        drafted += sum(len(entry.drafts) for entry in plan)
        return plan

    speculating.plan = spy  # type: ignore[method-assign]
    tokens = 3 * TOKENS
    assert generate(runner, speculating, prompts, tokens, sampling) == generate(
        runner, plain, prompts, tokens, sampling
    )
    assert drafted, "no drafts were made"


def test_overlapping_steps_do_not_change_tokens_with_a_repetition_penalty(runner: Runner) -> None:
    penalty = SamplingParams(temperature=0, repetition_penalty=1.5)
    plain = generate(runner, scheduler_of(runner, speculation=False), PROMPTS, TOKENS, penalty)
    assert generate(runner, scheduler_of(runner, speculation=False), PROMPTS, TOKENS, penalty, overlap=True) == plain
