"""Generates tokens with different scheduling variants: in a batch, in chunks, preempted, with drafts, overlapping."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpu_support.random_models import DistinctModel
from helexa.neuron.engine.execution import runner as runner_module
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.loop import Steps
from helexa.neuron.engine.scheduling import planning_and_preemption as planner_module
from helexa.neuron.engine.scheduling.plan import Plan, PlanEntry
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.kernel_header import PAGE_SIZE

LARGEST_STEP = 2048
"""Tokens per step; larger than all prompts, so prompts are chunked only if a `Scheduling` sets a smaller limit."""
GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True)
class Scheduling:
    """A scheduling variant: how the engine runs requests. No variant may change the tokens of an answer.

    Attributes:
        captured: whether steps replay captured CUDA graphs.
        overlap: whether a step is launched before the results of the previous step are read.
        batched: True if all requests run in one batch, False if they run one after the other.
        step_tokens: maximum number of tokens per step.
        few_pages: whether the KV cache is too small for prompts and outputs, so that sequences are preempted.
        reuse_prefixes: whether every request runs twice, the second time with prefix cache hits.
        drafts: whether sequences draft tokens. Each draft has two correct tokens and then a wrong token.
    """

    captured: bool = False
    overlap: bool = False
    batched: bool = True
    step_tokens: int = LARGEST_STEP
    few_pages: bool = False
    reuse_prefixes: bool = False
    drafts: bool = False

    @property
    def expected_counters(self) -> list[str]:
        """Names of the counters of `Results` that must not be 0, because otherwise the variant had no effect."""
        wanted = {
            "captured": self.captured,
            "ahead": self.overlap,
            "preempted": self.few_pages,
            "cached": self.reuse_prefixes,
            "accepted": self.drafts,
        }
        return [name for name, required in wanted.items() if required]


@dataclass
class Request:
    """A request to an engine.

    Attributes:
        prompt: token ids of the prompt.
        tokens: maximum number of output tokens.
        sampling: sampling parameters; greedy by default.
        stop_ids: token ids that end the output.
    """

    prompt: list[int]
    tokens: int
    sampling: SamplingParams = GREEDY
    stop_ids: list[int] = field(default_factory=list[int])


@dataclass
class Results:
    """The generated tokens of all requests, and counters.

    Attributes:
        tokens: generated tokens of each request.
        preempted: number of preemptions of sequences.
        cached: number of prompt tokens found in the prefix cache.
        accepted: number of accepted draft tokens.
        ahead: number of steps that were launched before the results of the previous step were read.
        captured: number of steps that replayed a captured graph.
        leaked: number of KV pages and state slots (slots of recurrent states) that are still in use at the end.
    """

    tokens: list[list[int]]
    preempted: int = 0
    cached: int = 0
    accepted: int = 0
    ahead: int = 0
    captured: int = 0
    leaked: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """The counters that are not 0, by name."""
        return {name: count for name, count in vars(self).items() if name != "tokens" and count}


class _CountingScheduler(Scheduler):
    """A scheduler that counts preemptions of sequences and overlapping steps."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.preempted = 0
        self.ahead = 0
        self._preempt, self.queues.preempt = self.queues.preempt, self._count_preempted

    def plan_after(self) -> Plan:
        plan = super().plan_after()
        self.ahead += bool(plan)
        return plan

    def _count_preempted(self, sequence: Sequence) -> None:
        self.preempted += 1
        self._preempt(sequence)


class _KnownDrafter:
    """A drafter that takes its draft tokens from outputs that are known in advance."""

    may_draft = True

    def __init__(self, known: list[list[int]], tokens: list[int]) -> None:
        self._known, self._tokens = known, tokens
        self.accepted = 0

    def draft(self, limit: int) -> tuple[int, ...]:
        for known in self._known:
            if known[: len(self._tokens)] == self._tokens:
                coming = known[len(self._tokens) :]
                return (*coming[:2], (coming[2:3] or [0])[0] ^ 1)[:limit]
        return ()

    def learn(self, drafted: int, accepted: int) -> None:
        self.accepted += accepted


def load(model: DistinctModel, options: EngineOptions, kernels: str) -> Runner:
    """Return a runner for the model `model`, which is in memory. Capture CUDA graphs if `options` enable them.

    Raises:
        RuntimeError: the kernels of the runner are not the kernels named `kernels`.
    """
    with mock.patch.object(runner_module, "open_checkpoint", lambda path: model):
        runner = load_once(Path("made"), options)
    if runner.ops.name != kernels:
        raise RuntimeError(f"there are no {kernels} kernels for this device; `neuron doctor` says why")
    if options.graphs:
        runner.warm_up()
    return runner


def answers(
    runner: Runner, requests: list[Request], scheduling: Scheduling, known: list[list[int]] | None = None
) -> Results:
    """Run requests with a scheduling variant, and return their tokens and counters.

    Args:
        runner: runs the forward passes of the model.
        requests: the requests.
        scheduling: the scheduling variant.
        known: expected tokens of each request, from which draft tokens are taken.
    """
    results = Results([[] for _ in requests])
    with _counting(runner, results), _guessing(requests, known, results):
        if scheduling.batched:
            _run(runner, dict(enumerate(requests)), scheduling, results)
            return results
        for number, request in enumerate(requests):
            _run(runner, {number: request}, scheduling, results)
    return results


def logits(runner: Runner, requests: list[Request], scheduling: Scheduling) -> tuple[list[list[int]], list[Tensor]]:
    """Return the greedy tokens of each request, and the logits from which they were chosen.

    The logits of a request have the shape [tokens, V] (V vocabulary entries) and are on the CPU.
    """
    request_rows: list[list[Tensor]] = [[] for _ in requests]
    tokens: list[list[int]] = [[] for _ in requests]
    batches = [range(len(requests))] if scheduling.batched else [range(n, n + 1) for n in range(len(requests))]
    for numbers in batches:
        scheduler = _scheduler(runner, {number: requests[number] for number in numbers}, scheduling)
        while not scheduler.idle:
            plan = scheduler.plan()
            rows = runner.logits_of(build_step(plan)).float().cpu().clone()
            for entry, row in zip((entry for entry in plan if entry.samples), rows, strict=True):
                request_rows[entry.sequence.id].append(row)
            for output in scheduler.commit(plan, rows.argmax(-1).tolist()):
                tokens[output.id] += output.tokens
    return tokens, [torch.stack(rows) for rows in request_rows]


def logits_of(runner: Runner, prompt: list[int], tokens: list[int]) -> Tensor:
    """Return the logits with which the model predicts each of `tokens` after `prompt`.

    A single step computes them: it treats all of `tokens` except the last as draft tokens.

    Returns:
        Logits with shape [tokens, V] (V vocabulary entries) on the CPU.
    """
    request = Generate(id=0, prompt=prompt, max_tokens=1, sampling=GREEDY)
    pages = list(range(-(-(len(prompt) + len(tokens)) // PAGE_SIZE)))
    sequence = Sequence(request, pages=pages, slot=0)
    return (
        runner.logits_of(build_step([PlanEntry(sequence, len(prompt), drafts=tuple(tokens[:-1]))]))
        .float()
        .cpu()
        .clone()
    )


def _run(runner: Runner, requests: dict[int, Request], scheduling: Scheduling, results: Results) -> None:
    scheduler = _scheduler(runner, requests, scheduling)
    pool, states = scheduler.pages, scheduler.states
    steps = Steps(runner, scheduler, scheduling.overlap)
    for first_pass in (True, False) if scheduling.reuse_prefixes else (False,):
        while not steps.idle:
            for output in steps.advance():
                if output.error is not None:
                    raise RuntimeError(output.error)
                results.tokens[output.id] += output.tokens
        if first_pass:
            for number, request in requests.items():
                results.tokens[number].clear()
                _add(scheduler, number, request)
    results.preempted += scheduler.preempted
    results.ahead += scheduler.ahead
    results.cached += scheduler.queues.cached_tokens
    results.leaked += pool.total - pool.free
    if states is not None:
        results.leaked += runner.facts.max_sequences - len(states._live)


def _scheduler(runner: Runner, requests: dict[int, Request], scheduling: Scheduling) -> _CountingScheduler:
    """Return a scheduler with the options of the scheduling variant, to which the requests have been added."""
    facts = runner.facts
    options = EngineOptions(
        max_step_tokens=scheduling.step_tokens,
        max_prefill_beside_decode=0,
        max_sequences=facts.max_sequences,
        context_length=facts.context_length,
        prefix_reuse="principal" if scheduling.reuse_prefixes else "off",
        speculation=scheduling.drafts,
        speculation_max_sequences=facts.max_sequences,
    )
    tight = sum(-(-(len(request.prompt) + 1) // PAGE_SIZE) for request in requests.values())
    pages = tight if scheduling.few_pages else facts.kv_pages
    states = StatePool(facts.max_sequences, facts.snapshots) if facts.state_bytes else None
    scheduler = _CountingScheduler(options, PagePool(pages, PAGE_SIZE), states)
    for number, request in requests.items():
        _add(scheduler, number, request)
    return scheduler


def _add(scheduler: Scheduler, number: int, request: Request) -> None:
    generate = Generate(
        id=number,
        prompt=request.prompt,
        max_tokens=request.tokens,
        sampling=request.sampling,
        stop_ids=request.stop_ids,
    )
    if rejection := scheduler.add(Sequence(generate)):
        raise RuntimeError(rejection.error)


@contextmanager
def _counting(runner: Runner, results: Results) -> Iterator[None]:
    """Count the steps that replay a captured graph during the `with` block."""
    run = runner.ops.run

    def counted(forward: Any, batch: Batch, captured: bool = True) -> Tensor:
        results.captured += batch.bucket is not None
        return run(forward, batch, captured)

    with mock.patch.object(runner.ops, "run", counted):
        yield


@contextmanager
def _guessing(requests: list[Request], known: list[list[int]] | None, results: Results) -> Iterator[None]:
    """Make schedulers take draft tokens from the `known` tokens of each request during the `with` block."""
    texts = [request.prompt + tokens for request, tokens in zip(requests, known or [], strict=False)]
    drafters: list[_KnownDrafter] = []

    def make_drafter(tokens: list[int]) -> _KnownDrafter:
        drafters.append(_KnownDrafter(texts, tokens))
        return drafters[-1]

    with mock.patch.object(planner_module, "Drafter", make_drafter):
        yield
    results.accepted = sum(drafter.accepted for drafter in drafters)
