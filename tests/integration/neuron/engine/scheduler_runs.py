"""Run a scheduler and a runner without the engine loop, until all requests have ended."""

from collections.abc import Sequence as Rows
from dataclasses import replace

import pytest

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import StatePool
from helexa.neuron.engine.loop import Steps, page_pool
from helexa.neuron.engine.scheduling.prompt_images import TEXT_TRAITS
from helexa.neuron.engine.scheduling.queues import Queues
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence

GREEDY = SamplingParams(temperature=0)


def scheduler_of(runner: Runner, pages: int = 0, **options: object) -> Scheduler:
    """Return a scheduler over the runner's state slots and its first `pages` KV pages; 0 for all pages."""
    engine_options, facts = EngineOptions(**options), runner.facts  # type: ignore[arg-type]
    states = StatePool(engine_options.max_sequences, facts.snapshots) if facts.state_bytes else None
    traits = TEXT_TRAITS if runner.encoder is None else runner.encoder.traits
    facts = replace(facts, kv_pages=pages or facts.kv_pages)
    return Scheduler(engine_options, page_pool(facts), states, None, traits, facts.window, facts.drafts)


def recorded_preemptions(monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """Return a list to which each later preemption in this process adds its sequence."""
    preempted: list[Sequence] = []
    preempt = Queues.preempt

    def spy(self: Queues, sequence: Sequence) -> None:
        preempted.append(sequence)
        preempt(self, sequence)

    monkeypatch.setattr(Queues, "preempt", spy)
    return preempted


def generate(
    runner: Runner,
    scheduler: Scheduler,
    prompts: Rows[list[int]],
    max_tokens: int,
    sampling: SamplingParams = GREEDY,
    *,
    stop_ids: Rows[int] = (),
    overlap: bool = False,
) -> list[list[int]]:
    """Run all prompts in one batch; return the output tokens of each prompt."""
    for number, prompt in enumerate(prompts):
        request = Generate(id=number, prompt=prompt, max_tokens=max_tokens, sampling=sampling, stop_ids=list(stop_ids))
        assert scheduler.add(Sequence(request)) is None
    tokens: list[list[int]] = [[] for _ in prompts]
    steps = Steps(runner, scheduler, overlap)
    while not steps.idle:
        for output in steps.advance():
            assert output.error is None
            tokens[output.id] += output.tokens
    scheduler.check_idle()
    return tokens
