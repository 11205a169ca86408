"""Answers of an engine for different scheduling: alone or batched, chunked, preempted, speculated, overlapped."""

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
from helexa.neuron.engine.execution.step_builder import build_step
from helexa.neuron.engine.ipc.messages import EngineOptions, Generate, SamplingParams
from helexa.neuron.engine.kv_cache.page_pool import PagePool
from helexa.neuron.engine.kv_cache.state_pool import StatePool
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling import planner as planner_module
from helexa.neuron.engine.scheduling.plan import Plan, PlanEntry
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.steps import Steps
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.constants import PAGE_SIZE

LARGEST_STEP = 2048
"""Tokens per step; larger than all prompts, so prompts are chunked only if a `Way` sets a smaller limit."""
GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True)
class Way:
    """Scheduling of requests.

    Attributes:
        recorded: whether the runner uses captured graphs.
        overlap: whether a step is launched before the results of the previous step are read.
        together: whether all requests run in one batch; otherwise one after the other.
        step_tokens: maximum number of tokens per step.
        tight: whether the KV pages suffice only for the prompts and not for the answers.
        reuse: whether cached prefixes are reused; every request runs twice.
        guesses: whether drafts are used, of which the first two tokens are correct and the third is wrong.
    """

    recorded: bool = False
    overlap: bool = False
    together: bool = True
    step_tokens: int = LARGEST_STEP
    tight: bool = False
    reuse: bool = False
    guesses: bool = False

    @property
    def brings(self) -> list[str]:
        """Counters of `Seen` that must not be 0 with this scheduling."""
        wanted = {
            "recorded": self.recorded,
            "ahead": self.overlap,
            "preempted": self.tight,
            "cached": self.reuse,
            "kept": self.guesses,
        }
        return [name for name, there in wanted.items() if there]


@dataclass
class Request:
    """A request: prompt, answer length, sampling parameters and stop tokens."""

    prompt: list[int]
    tokens: int
    sampling: SamplingParams = GREEDY
    stop_ids: list[int] = field(default_factory=list[int])


@dataclass
class Seen:
    """Results of requests.

    Attributes:
        tokens: tokens of each request.
        preempted: number of preempted sequences.
        cached: number of prompt tokens found in the cache.
        kept: number of accepted draft tokens.
        ahead: number of steps launched before the results of the previous step were read.
        recorded: number of steps replayed from captured graphs.
        held: number of KV pages and state slots in use at the end.
    """

    tokens: list[list[int]]
    preempted: int = 0
    cached: int = 0
    kept: int = 0
    ahead: int = 0
    recorded: int = 0
    held: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Counters other than 0, by name."""
        return {name: count for name, count in vars(self).items() if name != "tokens" and count}


class _Watched(Scheduler):
    """A scheduler that counts preemptions and overlapped steps."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
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


class _Foresight:
    """Drafter that proposes tokens of known answers."""

    may_draft = True

    def __init__(self, known: list[list[int]], tokens: list[int]) -> None:
        self._known, self._tokens = known, tokens
        self.kept = 0

    def draft(self, limit: int) -> tuple[int, ...]:
        for known in self._known:
            if known[: len(self._tokens)] == self._tokens:
                coming = known[len(self._tokens) :]
                return (*coming[:2], (coming[2:3] or [0])[0] ^ 1)[:limit]
        return ()

    def learn(self, drafted: int, accepted: int) -> None:
        self.kept += accepted


def load(model: DistinctModel, options: EngineOptions, kernels: str) -> Runner:
    """Return a runner of an in-memory model; steps are captured if `options` enable graphs."""
    with mock.patch.object(runner_module, "open_checkpoint", lambda path: model):
        runner = load_once(Path("made"), options)
    if runner.ops.name != kernels:
        raise RuntimeError(f"there are no {kernels} kernels for this device; `neuron doctor` says why")
    if options.graphs:
        runner.warm_up()
    return runner


def answers(runner: Runner, requests: list[Request], way: Way, known: list[list[int]] | None = None) -> Seen:
    """Run requests with the given scheduling.

    Args:
        known: tokens of each request's answer, from which drafts are taken.
    """
    seen = Seen([[] for _ in requests])
    with _counting(runner, seen), _guessing(requests, known, seen):
        if way.together:
            _run(runner, dict(enumerate(requests)), way, seen)
            return seen
        for number, request in enumerate(requests):
            _run(runner, {number: request}, way, seen)
    return seen


def logits(runner: Runner, requests: list[Request], way: Way) -> tuple[list[list[int]], list[Tensor]]:
    """Return the greedy tokens of each request, and the logits [tokens, V] of each token on the CPU."""
    found: list[list[Tensor]] = [[] for _ in requests]
    tokens: list[list[int]] = [[] for _ in requests]
    groups = [range(len(requests))] if way.together else [range(n, n + 1) for n in range(len(requests))]
    for numbers in groups:
        scheduler = _scheduler(runner, {number: requests[number] for number in numbers}, way)
        while not scheduler.idle:
            plan = scheduler.plan()
            rows = runner.forward(build_step(plan)).float().cpu().clone()
            for entry, row in zip((entry for entry in plan if entry.samples), rows, strict=True):
                found[entry.sequence.id].append(row)
            for output in scheduler.commit(plan, rows.argmax(-1).tolist()):
                tokens[output.id] += output.tokens
    return tokens, [torch.stack(rows) for rows in found]


def logits_of(runner: Runner, prompt: list[int], tokens: list[int]) -> Tensor:
    """Return the logits [tokens, V] before each of `tokens`, computed in one step, on the CPU."""
    request = Generate(id=0, prompt=prompt, max_tokens=1, sampling=GREEDY)
    pages = list(range(-(-(len(prompt) + len(tokens)) // PAGE_SIZE)))
    sequence = Sequence(request, pages=pages, slot=0)
    return (
        runner.forward(build_step([PlanEntry(sequence, len(prompt), drafts=tuple(tokens[:-1]))])).float().cpu().clone()
    )


def _run(runner: Runner, requests: dict[int, Request], way: Way, seen: Seen) -> None:
    scheduler = _scheduler(runner, requests, way)
    pool, states = scheduler.pages, scheduler.states
    steps = Steps(runner, scheduler, way.overlap)
    for again in (True, False) if way.reuse else (False,):
        while not steps.idle:
            for output in steps.advance():
                if output.error is not None:
                    raise RuntimeError(output.error)
                seen.tokens[output.id] += output.tokens
        if again:
            for number, request in requests.items():
                seen.tokens[number].clear()
                _add(scheduler, number, request)
    seen.preempted += scheduler.preempted
    seen.ahead += scheduler.ahead
    seen.cached += scheduler.queues.cached_tokens
    seen.held += pool.total - pool.free
    if states is not None:
        seen.held += runner.facts.max_sequences - len(states._live)


def _scheduler(runner: Runner, requests: dict[int, Request], way: Way) -> _Watched:
    """Return a scheduler with the requests."""
    facts = runner.facts
    options = EngineOptions(
        max_step_tokens=way.step_tokens,
        max_prefill_beside_decode=0,
        max_sequences=facts.max_sequences,
        context_length=facts.context_length,
        prefix_reuse="principal" if way.reuse else "off",
        speculation=way.guesses,
        speculation_max_sequences=facts.max_sequences,
    )
    tight = sum(-(-(len(request.prompt) + 1) // PAGE_SIZE) for request in requests.values())
    pages = tight if way.tight else facts.kv_pages
    states = StatePool(facts.max_sequences, facts.snapshots) if facts.state_bytes else None
    scheduler = _Watched(options, PagePool(pages, PAGE_SIZE), states)
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
    if refusal := scheduler.add(Sequence(generate)):
        raise RuntimeError(refusal.error)


@contextmanager
def _counting(runner: Runner, seen: Seen) -> Iterator[None]:
    """Count the steps replayed from captured graphs."""
    run = runner.ops.run

    def counted(forward: Any, batch: Batch, recorded: bool = True) -> Tensor:
        seen.recorded += batch.bucket is not None
        return run(forward, batch, recorded)

    with mock.patch.object(runner.ops, "run", counted):
        yield


@contextmanager
def _guessing(requests: list[Request], known: list[list[int]] | None, seen: Seen) -> Iterator[None]:
    """Make schedulers take drafts from known answers."""
    texts = [request.prompt + tokens for request, tokens in zip(requests, known or [], strict=False)]
    drafters: list[_Foresight] = []

    def made(tokens: list[int]) -> _Foresight:
        drafters.append(_Foresight(texts, tokens))
        return drafters[-1]

    with mock.patch.object(planner_module, "Drafter", made):
        yield
    seen.kept = sum(drafter.kept for drafter in drafters)
