"""Driving an engine by hand: a scheduler over a runner, to the end."""

from collections.abc import Sequence as Rows

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.messages import EngineOptions, Generate, SamplingParams
from helexa.neuron.engine.kv_cache.page_pool import PagePool
from helexa.neuron.engine.kv_cache.state_pool import StatePool
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.steps import Steps
from helexa.neuron.ops.constants import PAGE_SIZE

GREEDY = SamplingParams(temperature=0)


def scheduler_of(runner: Runner, pages: int = 0, **options: object) -> Scheduler:
    """A scheduler over all pages of the runner, or over the first few, and over its states if it has such."""
    built, facts = EngineOptions(**options), runner.facts  # type: ignore[arg-type]
    states = StatePool(built.max_sequences, facts.snapshots) if facts.state_bytes else None
    return Scheduler(built, PagePool(pages or facts.kv_pages, PAGE_SIZE), states)


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
    """The output tokens of each prompt, all run together."""
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
