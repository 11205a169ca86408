"""Short prompts beside long prompts, in virtual time. The duration of a step follows a cost model."""

import random
from statistics import quantiles

import pytest

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.scheduling.step_limits_and_fair_share import StepController

CHUNK = 512
LONG, SHORT, OUTPUT = 8192, 32, 10
STEP, ROW, TOKEN, POSITION = 0.002, 0.010, 0.0025, 3e-7
"""Seconds of a step, of a decode row, of a prompt token, and of each position before a prompt token."""


class Simulation:
    """A scheduler without a model: requests arrive at given times, and steps take the seconds of the cost model.

    Attributes:
        latencies: seconds from arrival to the last token, by request.
        steps: number of steps.
    """

    def __init__(self, max_step_tokens: int = CHUNK) -> None:
        options = EngineOptions(speculation=False, max_step_tokens=max_step_tokens)
        self.scheduler = Scheduler(options, PagePool(4000, 64), None, StepController(options, 120.0))
        self.latencies: dict[int, float] = {}
        self.now = 0.0
        self.steps = 0
        self._arrivals: list[tuple[float, Sequence]] = []

    def send(self, at: float, prompt: int | list[int], max_tokens: int = OUTPUT, principal: str = "") -> int:
        """Let a request arrive; return its number."""
        number = len(self._arrivals)
        tokens = random.Random(number).choices(range(1000), k=prompt) if isinstance(prompt, int) else prompt
        request = Generate(id=number, prompt=tokens, max_tokens=max_tokens, sampling=SamplingParams(), salt=principal)
        self._arrivals.append((at, Sequence(request)))
        return number

    def run(self) -> None:
        """Run until all requests have ended."""
        pending = sorted(self._arrivals, key=lambda pair: pair[0])
        while pending or not self.scheduler.idle:
            if self.scheduler.idle:
                self.now = max(self.now, pending[0][0])
            while pending and pending[0][0] <= self.now:
                assert self.scheduler.add(pending.pop(0)[1]) is None
            self._step()
        self.scheduler.check_idle()

    def _step(self) -> None:
        plan = self.scheduler.plan()
        assert plan, "the requests do not end"
        self.steps += 1
        seconds = STEP
        for entry in plan:
            middle = entry.sequence.computed + entry.count / 2
            seconds += ROW if entry.sequence.decoding else entry.count * (TOKEN + POSITION * middle)
        self.now += seconds
        for output in self.scheduler.commit(plan, [9 for entry in plan if entry.samples], seconds):
            if output.finish:
                self.latencies[output.id] = self.now - self._arrivals[output.id][0]


def seconds_alone(prompt: int, max_tokens: int) -> float:
    """Return the latency of a request without other requests, in seconds."""
    simulation = Simulation()
    number = simulation.send(0.0, prompt, max_tokens)
    simulation.run()
    return simulation.latencies[number]


@pytest.mark.parametrize(
    ("long", "short"),
    [([""], ""), (["a"], "b"), (["", ""], ""), (["a", "b"], "c"), (["a", "a", "a"], "a"), (["a", "b"], "a")],
)
def test_short_request_waits_at_most_about_three_chunks_of_long_prompts(long: list[str], short: str) -> None:
    simulation = Simulation()
    for principal in long:
        simulation.send(0.0, LONG, 1, principal)
    shorts = [simulation.send(0.2 + 0.9 * number, SHORT, principal=short) for number in range(40)]
    simulation.run()
    chunk = seconds_alone(LONG, 1) / (LONG / CHUNK)
    short_latencies = [simulation.latencies[number] for number in shorts]
    assert quantiles(short_latencies, n=20)[-1] <= 3 * chunk + seconds_alone(SHORT, OUTPUT)
    assert max(short_latencies) <= 4 * chunk + seconds_alone(SHORT, OUTPUT)


def test_short_requests_delay_a_long_prompt_only_by_their_own_computation() -> None:
    simulation = Simulation()
    long = simulation.send(0.0, LONG, 1)
    count = int(seconds_alone(LONG, 1) / 2)
    for number in range(count):
        simulation.send(0.2 + 2.0 * number, SHORT)
    simulation.run()
    assert simulation.latencies[long] <= 1.05 * (seconds_alone(LONG, 1) + count * seconds_alone(SHORT, OUTPUT))


def test_long_prompt_gets_half_of_each_step_beside_short_prompts() -> None:
    simulation = Simulation()
    long = simulation.send(0.0, LONG, 1)
    for number in range(200):
        simulation.send(0.6 * number, 200, 1)
    simulation.run()
    assert simulation.latencies[long] <= 2.2 * seconds_alone(LONG, 1)


def test_second_long_prompt_ends_after_the_first_beside_many_short_prompts() -> None:
    simulation = Simulation()
    first, second = simulation.send(0.0, LONG, 1), simulation.send(0.0, LONG, 1)
    for number in range(200):
        simulation.send(0.6 * number, 200, 1)
    simulation.run()
    assert simulation.latencies[first] < simulation.latencies[second] <= 2.2 * 2 * seconds_alone(LONG, 1)


def test_prompt_with_cached_prefix_counts_as_short() -> None:
    simulation = Simulation()
    prefix = random.Random(5).choices(range(1000), k=4096)
    simulation.send(0.0, prefix, 1)
    simulation.run()
    simulation.send(simulation.now, LONG, 1)
    simulation.send(simulation.now, 2048, 1)
    turn = simulation.send(simulation.now + 0.1, [*prefix, *range(20)], 1)
    simulation.run()
    assert simulation.latencies[turn] <= 3 * seconds_alone(LONG, 1) / (LONG / CHUNK)


def test_prompts_of_equal_length_are_computed_one_after_another() -> None:
    simulation = Simulation()
    numbers = [simulation.send(0.0, 2000, 1) for _ in range(5)]
    simulation.run()
    assert sorted(numbers, key=lambda number: simulation.latencies[number]) == numbers
