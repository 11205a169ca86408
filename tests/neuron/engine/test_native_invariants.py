"""However a sequence is scheduled, its greedy tokens are the same on the native kernels; on those of stock torch they
differ only where the float32 reference hesitates, too."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from driving import generate, scheduler_of

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder import build_step
from helexa.neuron.engine.ipc.messages import EngineOptions, Generate, SamplingParams
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.queues import Queues
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.ops.constants import PAGE_SIZE
from helexa.neuron.ops.native import compiler
from helexa.neuron.ops.native.compiler import Unavailable
from helexa.neuron.ops.native.native import NativeOps
from helexa.neuron.ops.torch_cpu import CpuOps

# "The capital of France is", then made-up text of different lengths; page borders (64) fall inside and at the ends.
FRANCE = [504, 3575, 282, 4649, 314]
PROMPTS = [
    FRANCE + [(900 + 37 * n + 7 * i) % 4000 for i in range(length)]
    for n, length in enumerate((0, 1, 12, 40, 58, 59, 60, 130))
]
TOKENS = 8
Reference = Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor]
CACHE_MB = 128
HESITATION = 0.4
"""Natural logarithm of the ratio of two probabilities between which rounding may choose."""


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[int]:
    """Torch gets one: more of them wait for each other whenever another process wants a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield before
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["auto", "int8"])
def native(request: pytest.FixtureRequest, threads: int, smollm2_gguf: Path) -> Runner:
    """SmolLM2 on the native kernels and threads of their own, with K and V in 16 and in 8 bits."""
    torch.set_num_threads(threads)
    runner = load_once(smollm2_gguf, EngineOptions(kv_cache_mb=CACHE_MB, kv_dtype=request.param))
    torch.set_num_threads(1)
    if runner.ops.name != NativeOps.name:
        pytest.skip("no C compiler on this machine: plain torch serves")
    return runner


@pytest.fixture(scope="module")
def stock(smollm2_gguf: Path) -> Runner:
    """SmolLM2 on what stock torch has for this processor."""
    if not CpuOps.available():
        pytest.skip("this CPU does not multiply bfloat16")

    def no_compiler() -> None:
        raise Unavailable("not for this test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "native_kernels", no_compiler)
        runner = load_once(smollm2_gguf, EngineOptions(kv_cache_mb=CACHE_MB))
    assert runner.ops.name == CpuOps.name
    return runner


@pytest.fixture(scope="module")
def reference(runner: Runner) -> Reference:
    """What the float32 reference says of a prompt and the tokens after it, computed once."""
    return cache(partial(log_probabilities, runner))


@pytest.fixture(scope="module")
def alone(native: Runner) -> list[list[int]]:
    return [generate(native, scheduler_of(native), [prompt], TOKENS)[0] for prompt in PROMPTS]


def test_a_batch_of_eight_gives_the_same_tokens(native: Runner, alone: list[list[int]]) -> None:
    assert generate(native, scheduler_of(native), PROMPTS, TOKENS) == alone


def test_a_batch_of_twenty_gives_the_same_tokens(native: Runner, alone: list[list[int]]) -> None:
    assert generate(native, scheduler_of(native), PROMPTS * 2 + PROMPTS[:4], TOKENS) == alone * 2 + alone[:4]


def test_a_chunk_budget_of_sixteen_gives_the_same_tokens(native: Runner, alone: list[list[int]]) -> None:
    assert generate(native, scheduler_of(native, max_step_tokens=16), PROMPTS, TOKENS) == alone


def test_preemption_gives_the_same_tokens(
    native: Runner, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted: list[int] = []
    preempt = Queues.preempt

    def spy(self: Queues, sequence: Sequence) -> None:
        preempted.append(len(sequence.tokens))
        preempt(self, sequence)

    monkeypatch.setattr(Queues, "preempt", spy)
    assert generate(native, scheduler_of(native, pages=7), PROMPTS, TOKENS) == alone
    assert any(length > PAGE_SIZE for length in preempted), "no sequence had a full page to come back to"


def test_a_prefix_hit_gives_the_same_tokens(native: Runner, alone: list[list[int]]) -> None:
    scheduler, long = scheduler_of(native), PROMPTS[-1]
    assert generate(native, scheduler, PROMPTS, TOKENS) == alone
    cached = scheduler.queues.cached_tokens
    assert generate(native, scheduler, PROMPTS, TOKENS) == alone
    assert scheduler.queues.cached_tokens - cached >= len(long) // PAGE_SIZE * PAGE_SIZE
    turn = [long + alone[-1] + FRANCE]
    fresh = scheduler_of(native, prefix_reuse="off")
    assert generate(native, scheduler, turn, TOKENS) == generate(native, fresh, turn, TOKENS)


def test_native_tokens_are_the_references_unless_it_hesitates(
    native: Runner, runner: Runner, reference: Reference, alone: list[list[int]]
) -> None:
    assert generate(runner, scheduler_of(runner), [FRANCE], 4) == [alone[0][:4]]
    for prompt, tokens in zip(PROMPTS, alone, strict=True):
        near_the_reference(native, reference, prompt, tokens)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"max_step_tokens": 16}, marks=pytest.mark.nightly),
        pytest.param({"max_sequences": 1}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_tokens_of_stock_torch_are_the_references_unless_it_hesitates(
    stock: Runner, reference: Reference, options: dict[str, int]
) -> None:
    for prompt, tokens in zip(PROMPTS, generate(stock, scheduler_of(stock, **options), PROMPTS, TOKENS), strict=True):
        near_the_reference(stock, reference, prompt, tokens)


def near_the_reference(ours: Runner, reference: Reference, prompt: list[int], tokens: list[int]) -> None:
    """Each token is one that the reference might have chosen, and probabilities on the way are like its own."""
    expected, actual = reference(tuple(prompt), tuple(tokens)), log_probabilities(ours, prompt, tokens)
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (expected.amax(1) - chosen).max() < HESITATION
    assert (expected.exp() * (expected - actual)).sum(1).max() < 0.03  # nats


def log_probabilities(runner: Runner, prompt: Rows[int], tokens: Rows[int]) -> torch.Tensor:
    """[tokens, vocabulary], before each of `tokens`."""
    request = Generate(id=0, prompt=list(prompt), max_tokens=1, sampling=SamplingParams())
    sequence = Sequence(request, pages=list(range(4)))
    logits = runner.forward(build_step([PlanEntry(sequence, len(prompt), drafts=tuple(tokens[:-1]))]))
    return logits.double().log_softmax(-1)
