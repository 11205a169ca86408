"""A failing step, or one with non-finite results, fails only the requests that cause it."""

import random

import pytest
from simulated_cache import SimulatedCache

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams, TokenOutput
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool
from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.ops.kernel_header import NON_FINITE

FATAL = 7
"""A token that makes every step with its sequence fail."""
NOT_FINITE = 8
"""A token that makes its sequence's logits NaN."""


def next_token(tokens: list[int]) -> int:
    return 10 + sum(tokens) % 40


class FailingModel(SimulatedCache):
    """Runs a step, then fails, or reports non-finite results for some sequences."""

    def run(self, plan: Plan) -> list[int]:
        sampled = super().run(plan)
        if any(FATAL in entry.sequence.tokens for entry in plan):
            raise ValueError("simulated failure")
        rows = [entry for entry in plan if entry.samples for _ in range(len(entry.drafts) + 1)]
        return [
            NON_FINITE if NOT_FINITE in entry.sequence.tokens else token
            for entry, token in zip(rows, sampled, strict=True)
        ]


def run(scheduler: Scheduler, requests: list[Generate], computer: SimulatedCache) -> dict[int, TokenOutput]:
    """Run all requests; return each request's last output, with all of its tokens."""
    waiting, ended, tokens = list(requests), {}, {request.id: [] for request in requests}
    steps = 0
    while waiting or not scheduler.idle:
        if waiting and steps % 2 == 0:
            assert scheduler.add(Sequence(waiting.pop(0))) is None
        steps += 1
        assert steps < 5000, "the requests do not end"
        plan = scheduler.plan()
        try:
            outputs = scheduler.commit(plan, computer.run(plan)) if plan else []
        except ValueError:
            outputs = scheduler.isolate(plan, "simulated failure")
        for output in outputs:
            tokens[output.id] += output.tokens
            if output.finish:
                ended[output.id] = output
        scheduler.check_idle()
    return {number: TokenOutput(id=number, tokens=tokens[number], finish=o.finish) for number, o in ended.items()}


def scheduler_of(hybrid: bool, pages: int = 60) -> Scheduler:
    options = EngineOptions(max_step_tokens=24, max_sequences=8, max_waiting=100)
    return Scheduler(options, PagePool(pages, 4), StatePool(8, 6) if hybrid else None)


def prompts(chance: random.Random, count: int, bad: list[int]) -> list[Generate]:
    """Return requests with common prefixes; some prompts contain a bad token."""
    requests = []
    for number in range(count):
        prompt = [20] * chance.randrange(1, 14) + [30 + number] * chance.randrange(1, 30)
        if bad and chance.random() < 0.3:
            prompt.insert(chance.randrange(len(prompt)), chance.choice(bad))
        sampling = SamplingParams(temperature=0)
        requests.append(Generate(id=number, prompt=prompt, max_tokens=chance.randrange(1, 12), sampling=sampling))
    return requests


@pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
@pytest.mark.parametrize("seed", range(6))
def test_requests_that_fail_do_not_change_the_outputs_of_other_requests(hybrid: bool, seed: int):
    requests = prompts(random.Random(seed), 16, [FATAL, NOT_FINITE])
    bad = {request.id for request in requests if {FATAL, NOT_FINITE} & set(request.prompt)}
    assert 0 < len(bad) < 16
    pages = 60 if seed % 2 else 24  # with 24 pages, some sequences are preempted
    scheduler = scheduler_of(hybrid, pages)
    outputs = run(scheduler, requests, FailingModel(scheduler, next_token))
    healthy = scheduler_of(hybrid)
    expected = run(healthy, [r for r in requests if r.id not in bad], SimulatedCache(healthy, next_token))
    assert {number for number, output in outputs.items() if output.finish == "error"} == bad
    assert {number: output for number, output in outputs.items() if number not in bad} == expected
    assert all(output.tokens == [] for number, output in outputs.items() if number in bad)


def test_unshared_pages_of_a_request_with_non_finite_logits_are_cleared():
    scheduler = scheduler_of(hybrid=False)
    (bad, repeated) = (
        Generate(id=number, prompt=[20] * 9 + [NOT_FINITE] + [21] * 9, max_tokens=3, sampling=SamplingParams())
        for number in range(2)
    )
    computer = FailingModel(scheduler, next_token)
    run(scheduler, [bad], computer)
    assert sorted(scheduler.committer.take_pages_to_clear()) == list(range(5))
    assert scheduler.committer.take_pages_to_clear() == []
    run(scheduler, [repeated], computer)
    assert scheduler.queues.cached_tokens == 0


def test_pages_that_a_request_with_non_finite_logits_shares_are_kept():
    scheduler = scheduler_of(hybrid=False)
    computer = FailingModel(scheduler, next_token)
    sampling = SamplingParams(temperature=0)
    scheduler.add(Sequence(Generate(id=1, prompt=[20] * 9, max_tokens=9, sampling=sampling)))
    plan = scheduler.plan()
    scheduler.commit(plan, computer.run(plan))
    scheduler.add(Sequence(Generate(id=2, prompt=[20] * 9 + [NOT_FINITE], max_tokens=9, sampling=sampling)))
    plan = scheduler.plan()
    shared = set(plan[0].sequence.pages) & set(plan[1].sequence.pages)
    assert shared
    scheduler.commit(plan, computer.run(plan))
    cleared = set(scheduler.committer.take_pages_to_clear())
    assert cleared
    assert not shared & cleared


class FailingAtToken(SimulatedCache):
    """Runs a step, then fails if the step computed the fatal token."""

    def run(self, plan: Plan) -> list[int]:
        sampled = super().run(plan)
        for entry in plan:
            computed = entry.sequence.computed
            if FATAL in entry.sequence.tokens[computed : computed + entry.count]:
                raise ValueError("simulated failure")
        return sampled


def request(number: int, prompt: list[int], max_tokens: int) -> Generate:
    return Generate(id=number, prompt=prompt, max_tokens=max_tokens, sampling=SamplingParams(temperature=0))


@pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
def test_prompt_whose_last_chunk_raises_an_error_fails_no_other_request(hybrid: bool):
    scheduler = scheduler_of(hybrid, pages=200)
    requests = [request(number, [40 + number] * 9, 60) for number in range(3)]
    requests += [request(3, [30] * 200 + [FATAL], 9), request(4, [31] * 200, 9)]
    outputs = run(scheduler, requests, FailingAtToken(scheduler, next_token))
    assert [outputs[number].finish for number in range(5)] == ["length", "length", "length", "error", "length"]
    assert [len(outputs[number].tokens) for number in range(5)] == [60, 60, 60, 0, 9]


@pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
def test_other_sequences_advance_while_a_failing_long_prompt_is_isolated(hybrid: bool):
    scheduler = scheduler_of(hybrid, pages=300)
    computer = FailingAtToken(scheduler, next_token)
    for number in range(3):
        scheduler.add(Sequence(request(number, [40 + number] * 9, 200)))
    plan = scheduler.plan()
    scheduler.commit(plan, computer.run(plan))
    scheduler.add(Sequence(request(3, [30] * 600, 9)))
    scheduler.add(Sequence(request(4, [FATAL], 9)))
    failed, steps, longest, last = False, 0, 0, dict.fromkeys(range(3), 0)  # last: step of each sequence's last output
    while not any(sequence.id == 3 and sequence.generated for sequence in scheduler.running):
        steps += 1
        plan = scheduler.plan()
        try:
            outputs = scheduler.commit(plan, computer.run(plan))
        except ValueError:
            failed = True
            outputs = scheduler.isolate(plan, "simulated failure")
        for output in outputs:
            if output.id in last:
                last[output.id] = steps
        longest = max(longest, steps - min(last.values()))
    assert failed
    assert steps > 600 // 24
    assert longest <= 2 * 5  # each of five suspects runs alone for a step, and a common step follows


def test_sequence_can_be_canceled_while_the_engine_isolates_a_failed_step():
    scheduler = scheduler_of(hybrid=False)
    sampling = SamplingParams(temperature=0)
    for number in range(3):
        scheduler.add(Sequence(Generate(id=number, prompt=[number] * 5, max_tokens=2, sampling=sampling)))
    assert scheduler.isolate(scheduler.plan(), "simulated failure") == []
    assert [entry.sequence.id for entry in scheduler.plan()] == [0]
    for number in range(3):
        assert scheduler.cancel(number)
    assert scheduler.idle
    assert scheduler.plan() == []
    scheduler.check_idle()
