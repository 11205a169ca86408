"""Answers of an engine, however their steps are scheduled: alone or in company, cut, preempted, guessed, overlapped."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from made_models import DistinctModel
from torch import Tensor

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
"""Tokens: no prompt is cut, unless a `Way` says so."""
GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True)
class Way:
    """How requests are scheduled.

    Attributes:
        recorded: by a runner that has recorded steps.
        overlap: steps are launched before those before them are read.
        together: all at once; else one after the other.
        step_tokens: at most, in a step.
        tight: there are pages for prompts, but not for all that comes after them.
        reuse: beginnings that were computed before are not computed again; the requests come twice.
        guesses: there are drafts, of which the first two are right and the third is wrong.
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
        """Of what `Seen` counts, what there must be some of."""
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
    """What is asked for, and where it ends."""

    prompt: list[int]
    tokens: int
    sampling: SamplingParams = GREEDY
    stop_ids: list[int] = field(default_factory=list[int])


@dataclass
class Seen:
    """What came of it.

    Attributes:
        tokens: of each request.
        preempted: sequences that began anew.
        cached: tokens of prompts that were found computed.
        kept: drafts that were right.
        ahead: steps that were launched before the one before was read.
        recorded: steps that had been recorded.
        held: pages that somebody held at the end, and slots of recurrent states.
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
        """Those that are not nought, by name."""
        return {name: count for name, count in vars(self).items() if name != "tokens" and count}


class _Watched(Scheduler):
    """A scheduler that counts."""

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
    """Drafts from answers that are known."""

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
    """A runner of a model that is in no file; steps are recorded if options say so."""
    with mock.patch.object(runner_module, "open_checkpoint", lambda path: model):
        runner = load_once(Path("made"), options)
    if runner.ops.name != kernels:
        raise RuntimeError(f"there are no {kernels} kernels for this device; `neuron doctor` says why")
    if options.graphs:
        runner.warm_up()
    return runner


def answers(runner: Runner, requests: list[Request], way: Way, known: list[list[int]] | None = None) -> Seen:
    """Run requests in some way.

    Args:
        known: what a way with guesses takes them from: the tokens of each request's answer.
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
    """For each request its greedy tokens, and the logits [tokens, V] on the CPU that they were chosen from."""
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
    """Logits [tokens, V] on the CPU, before each of `tokens`, in one step."""
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
    """One that has the requests."""
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
    """Count the steps that were recorded."""
    run = runner.ops.run

    def counted(forward: Any, batch: Batch, recorded: bool = True) -> Tensor:
        seen.recorded += batch.bucket is not None
        return run(forward, batch, recorded)

    with mock.patch.object(runner.ops, "run", counted):
        yield


@contextmanager
def _guessing(requests: list[Request], known: list[list[int]] | None, seen: Seen) -> Iterator[None]:
    """Have schedulers take drafts from what is known."""
    texts = [request.prompt + tokens for request, tokens in zip(requests, known or [], strict=False)]
    drafters: list[_Foresight] = []

    def made(tokens: list[int]) -> _Foresight:
        drafters.append(_Foresight(texts, tokens))
        return drafters[-1]

    with mock.patch.object(planner_module, "Drafter", made):
        yield
    seen.kept = sum(drafter.kept for drafter in drafters)
