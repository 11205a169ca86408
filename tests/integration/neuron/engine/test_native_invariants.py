"""Scheduling does not change greedy tokens on the native kernels. On the kernels of stock torch, tokens differ from the
float32 reference only where the reference's top probabilities are close."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from scheduler_runs import generate, scheduler_of

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.queues import Queues
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.native import kernel_library
from helexa.neuron.ops.native.kernel_library import Unavailable
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.ops.torch_cpu_ops import CpuOps
from nightly import cases, daily

# "The capital of France is" and artificial text of different lengths; page boundaries (64) fall inside and at the ends.
FRANCE = [504, 3575, 282, 4649, 314]
PROMPTS = [
    FRANCE + [(900 + 37 * n + 7 * i) % 4000 for i in range(length)]
    for n, length in enumerate((0, 1, 12, 40, 58, 59, 60, 130))
]
TOKENS = 8
COMPARED = slice(1, None, cases(3, 1))
"""Prompts whose tokens are compared with the reference, which computes each of them in float32."""
Reference = Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor]
CACHE_MB = 128
MAX_LOGPROB_GAP = 0.4
"""Largest difference of two log-probabilities, in nats, at which rounding may change the chosen token."""


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[int]:
    """Let torch use one thread: several threads are slow on a busy machine. Yield the default number."""
    default = torch.get_num_threads()
    torch.set_num_threads(1)
    yield default
    torch.set_num_threads(default)


KINDS = [("unquantized", 1), ("int8", 1), ("unquantized", 2), ("int8", 3)]
"""Type of the KV cache, and number of ranks; `ranks/test_architectures.py` has faster tests of several ranks."""


@pytest.fixture(scope="module", params=daily([("unquantized", 1), ("int8", 1)], KINDS), ids=str)
def native(request: pytest.FixtureRequest, threads: int, smollm2_gguf: Path) -> Iterator[Runner]:
    """SmolLM2 on the native kernels, with a 16-bit and an 8-bit KV cache, on one and on several ranks."""
    kv_dtype, ranks = request.param
    torch.set_num_threads(threads if ranks == 1 else 1)
    options = EngineOptions(kv_cache_mb=CACHE_MB, kv_dtype=kv_dtype, tensor_parallel=ranks)
    runner = load_once(smollm2_gguf, options)
    torch.set_num_threads(1)
    if runner.ops.name != NativeOps.name:
        pytest.skip("no C compiler on this machine: plain torch serves")
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def stock(smollm2_gguf: Path) -> Runner:
    """SmolLM2 on stock torch's kernels for this processor."""
    if not CpuOps.available():
        pytest.skip("this CPU does not multiply bfloat16")

    def no_compiler() -> None:
        raise Unavailable("not for this test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_library, "native_kernels", no_compiler)
        runner = load_once(smollm2_gguf, EngineOptions(kv_cache_mb=CACHE_MB))
    assert runner.ops.name == CpuOps.name
    return runner


@pytest.fixture(scope="module")
def reference(runner: Runner) -> Reference:
    """Return a cached function of a prompt and its output tokens: their log-probabilities by the float32 reference."""
    return cache(partial(log_probabilities, runner))


@pytest.fixture(scope="module")
def expected_tokens(native: Runner) -> list[list[int]]:
    return [generate(native, scheduler_of(native), [prompt], TOKENS)[0] for prompt in PROMPTS]


def test_batch_of_eight_generates_the_same_tokens_as_single_prompts(
    native: Runner, expected_tokens: list[list[int]]
) -> None:
    assert generate(native, scheduler_of(native), PROMPTS, TOKENS) == expected_tokens


def test_batch_of_twenty_generates_the_same_tokens_as_single_prompts(
    native: Runner, expected_tokens: list[list[int]]
) -> None:
    assert (
        generate(native, scheduler_of(native), PROMPTS * 2 + PROMPTS[:4], TOKENS)
        == expected_tokens * 2 + expected_tokens[:4]
    )


def test_prefill_chunks_of_16_tokens_do_not_change_the_generated_tokens(
    native: Runner, expected_tokens: list[list[int]]
) -> None:
    assert generate(native, scheduler_of(native, max_step_tokens=16), PROMPTS, TOKENS) == expected_tokens


def test_preemption_does_not_change_the_generated_tokens(
    native: Runner, expected_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted: list[int] = []
    preempt = Queues.preempt

    def spy(self: Queues, sequence: Sequence) -> None:
        preempted.append(len(sequence.tokens))
        preempt(self, sequence)

    monkeypatch.setattr(Queues, "preempt", spy)
    assert generate(native, scheduler_of(native, pages=7), PROMPTS, TOKENS) == expected_tokens
    assert any(length > PAGE_SIZE for length in preempted), "no preempted sequence had a full page to reuse"


def test_prefix_cache_hits_do_not_change_the_generated_tokens(native: Runner, expected_tokens: list[list[int]]) -> None:
    scheduler, long = scheduler_of(native), PROMPTS[-1]
    assert generate(native, scheduler, PROMPTS, TOKENS) == expected_tokens
    cached = scheduler.queues.cached_tokens
    assert generate(native, scheduler, PROMPTS, TOKENS) == expected_tokens
    assert scheduler.queues.cached_tokens - cached >= len(long) // PAGE_SIZE * PAGE_SIZE
    turn = [long + expected_tokens[-1] + FRANCE]
    fresh = scheduler_of(native, prefix_reuse="off")
    assert generate(native, scheduler, turn, TOKENS) == generate(native, fresh, turn, TOKENS)


def test_tokens_of_native_kernels_match_the_reference_except_at_near_ties(
    native: Runner, runner: Runner, reference: Reference, expected_tokens: list[list[int]]
) -> None:
    assert generate(runner, scheduler_of(runner), [FRANCE], 4) == [expected_tokens[0][:4]]
    for prompt, tokens in list(zip(PROMPTS, expected_tokens, strict=True))[COMPARED]:
        check_near_reference(native, reference, prompt, tokens)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"max_step_tokens": 16}, marks=pytest.mark.nightly),
        pytest.param({"max_sequences": 1}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_tokens_of_stock_torch_match_the_reference_except_at_near_ties(
    stock: Runner, reference: Reference, options: dict[str, int]
) -> None:
    outputs = generate(stock, scheduler_of(stock, **options), PROMPTS, TOKENS)
    for prompt, tokens in list(zip(PROMPTS, outputs, strict=True))[COMPARED]:
        check_near_reference(stock, reference, prompt, tokens)


def check_near_reference(candidate: Runner, reference: Reference, prompt: list[int], tokens: list[int]) -> None:
    """Check that the reference could have chosen each token with similar probabilities."""
    expected, actual = reference(tuple(prompt), tuple(tokens)), log_probabilities(candidate, prompt, tokens)
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (expected.amax(1) - chosen).max() < MAX_LOGPROB_GAP
    assert (expected.exp() * (expected - actual)).sum(1).max() < 0.03  # nats


def log_probabilities(runner: Runner, prompt: Rows[int], tokens: Rows[int]) -> torch.Tensor:
    """Return the log-probabilities before each of `tokens`, of shape [tokens, vocabulary]."""
    request = Generate(id=0, prompt=list(prompt), max_tokens=1, sampling=SamplingParams())
    sequence = Sequence(request, pages=list(range(4)))
    logits = runner.logits_of(build_step([PlanEntry(sequence, len(prompt), drafts=tuple(tokens[:-1]))]))
    return logits.double().log_softmax(-1)
