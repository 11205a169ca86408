"""However a sequence is scheduled, its greedy tokens are the same on the reference kernels, with random weights."""

from pathlib import Path

import pytest
from driving import generate, scheduler_of

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.messages import EngineOptions, SamplingParams
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.engine.scheduling.queues import Queues
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.ops.constants import PAGE_SIZE
from tiny_models import tiny_model

VOCABULARY = 512
# Made-up text of different lengths behind a common start; page borders (64) fall inside and at the ends.
START = [504, 357, 282, 464, 314]
PROMPTS = [
    START + [(90 + 37 * n + 7 * i) % VOCABULARY for i in range(length)]
    for n, length in enumerate((0, 1, 12, 40, 58, 59, 60, 130))
]
TOKENS = 16


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A small llama in float32, shaped like SmolLM2: the heads are three times as many as those of K and V."""
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
def alone(runner: Runner) -> list[list[int]]:
    return [generate(runner, scheduler_of(runner), [prompt], TOKENS)[0] for prompt in PROMPTS]


def test_a_batch_of_eight_gives_the_same_tokens(runner: Runner, alone: list[list[int]]) -> None:
    assert generate(runner, scheduler_of(runner), PROMPTS, TOKENS) == alone


def test_a_chunk_budget_of_sixteen_gives_the_same_tokens(runner: Runner, alone: list[list[int]]) -> None:
    assert generate(runner, scheduler_of(runner, max_step_tokens=16), PROMPTS, TOKENS) == alone


def test_preemption_gives_the_same_tokens(
    runner: Runner, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted: list[Sequence] = []
    preempt = Queues.preempt

    def spy(self: Queues, sequence: Sequence) -> None:
        preempted.append(sequence)
        preempt(self, sequence)

    monkeypatch.setattr(Queues, "preempt", spy)
    scheduler = scheduler_of(runner, pages=7)
    assert generate(runner, scheduler, PROMPTS, TOKENS) == alone
    assert preempted, "the pool was too large to test preemption"
    resumed = [s for s in preempted if len(s.tokens) > PAGE_SIZE]
    assert resumed, "no sequence had a full page to come back to"


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 16}, {"pages": 7}], ids=["plain", "chunked", "preempted"])
def test_overlap_gives_the_same_tokens(runner: Runner, alone: list[list[int]], options: dict[str, int]) -> None:
    scheduler = scheduler_of(runner, **options)  # type: ignore[arg-type]
    assert generate(runner, scheduler, PROMPTS, TOKENS, overlap=True) == alone


def test_overlap_ends_at_the_token_that_ends_an_answer(runner: Runner, alone: list[list[int]]) -> None:
    stop = alone[-1][TOKENS // 2]
    expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in alone]
    assert generate(runner, scheduler_of(runner), PROMPTS, TOKENS, stop_ids=[stop], overlap=True) == expected


def test_a_prefix_hit_gives_the_same_tokens(runner: Runner, alone: list[list[int]]) -> None:
    scheduler = scheduler_of(runner)
    long = PROMPTS[-1]
    for prompt, tokens in zip(PROMPTS, alone, strict=True):
        assert generate(runner, scheduler, [prompt], TOKENS) == [tokens]
    cached = scheduler.queues.cached_tokens
    assert generate(runner, scheduler, PROMPTS, TOKENS) == alone
    assert scheduler.queues.cached_tokens - cached >= len(long) // PAGE_SIZE * PAGE_SIZE
    (turn,) = generate(runner, scheduler, [long + alone[-1] + START], TOKENS)
    assert generate(runner, scheduler_of(runner, prefix_reuse="off"), [long + alone[-1] + START], TOKENS) == [turn]


def test_a_seed_gives_the_same_tokens_in_any_company(runner: Runner) -> None:
    seeded = SamplingParams(temperature=0.7, top_p=0.9, seed=7)
    other = SamplingParams(temperature=0.7, top_p=0.9, seed=8)
    (alone,) = generate(runner, scheduler_of(runner), [START], TOKENS, seeded)
    together = generate(runner, scheduler_of(runner, max_step_tokens=16), [START] * 4, TOKENS, seeded)
    assert together == [alone] * 4
    assert generate(runner, scheduler_of(runner), [START] * 4, TOKENS, seeded, overlap=True) == [alone] * 4
    assert generate(runner, scheduler_of(runner), [START], TOKENS, other) != [alone]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0),
        SamplingParams(  # it has two tokens to say, so that it repeats itself
            temperature=0.8, top_p=0.9, repetition_penalty=1.05, seed=7, logit_bias=dict.fromkeys(START[:2], 20.0)
        ),
    ],
)
def test_speculation_gives_the_same_tokens(runner: Runner, sampling: SamplingParams) -> None:
    # Two that repeat themselves, one that does not.
    prompts = [START * 14, [*PROMPTS[5], *PROMPTS[5]], PROMPTS[3]]
    guessing, plain = scheduler_of(runner), scheduler_of(runner, speculation=False)
    drafted = 0
    plan_step = guessing.plan

    def spy() -> Plan:
        nonlocal drafted
        plan = plan_step()
        drafted += sum(len(entry.drafts) for entry in plan)
        return plan

    guessing.plan = spy  # type: ignore[method-assign]
    tokens = 3 * TOKENS
    assert generate(runner, guessing, prompts, tokens, sampling) == generate(runner, plain, prompts, tokens, sampling)
    assert drafted, "nothing was guessed"


def test_tokens_with_a_repetition_penalty_are_the_same_where_steps_overlap(runner: Runner) -> None:
    penalty = SamplingParams(temperature=0, repetition_penalty=1.5)
    plain = generate(runner, scheduler_of(runner, speculation=False), PROMPTS, TOKENS, penalty)
    assert generate(runner, scheduler_of(runner, speculation=False), PROMPTS, TOKENS, penalty, overlap=True) == plain
