"""Short prompts beside long ones, in virtual time: steps take what a cost model says."""

import random
from statistics import quantiles

import pytest

from helexa.neuron.engine.ipc.messages import EngineOptions, Generate, SamplingParams
from helexa.neuron.engine.kv_cache.page_pool import PagePool
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.scheduling.step_controller import StepController

CHUNK = 512
LONG, SHORT, ANSWER = 8192, 32, 10
STEP, ROW, TOKEN, POSITION = 0.002, 0.010, 0.0025, 3e-7
"""Seconds of a step, of a decoding row and of a prompt token, and what each position before a prompt token adds."""


class World:
    """An engine without a model: requests arrive at given times, and steps take time by the cost model.

    Attributes:
        took: seconds from arrival to the last token, by request.
        steps: steps so far.
    """

    def __init__(self, max_step_tokens: int = CHUNK) -> None:
        options = EngineOptions(speculation=False, max_step_tokens=max_step_tokens)
        self.scheduler = Scheduler(options, PagePool(4000, 64), None, StepController(options, 120.0))
        self.took: dict[int, float] = {}
        self.now = 0.0
        self.steps = 0
        self._asked: list[tuple[float, Sequence]] = []

    def ask(self, at: float, prompt: int | list[int], answer: int = ANSWER, principal: str = "") -> int:
        """Let a request arrive; return its number."""
        number = len(self._asked)
        tokens = random.Random(number).choices(range(1000), k=prompt) if isinstance(prompt, int) else prompt
        request = Generate(id=number, prompt=tokens, max_tokens=answer, sampling=SamplingParams(), salt=principal)
        self._asked.append((at, Sequence(request)))
        return number

    def run(self) -> None:
        """Run until all requests have ended."""
        coming = sorted(self._asked, key=lambda pair: pair[0])
        while coming or not self.scheduler.idle:
            if self.scheduler.idle:
                self.now = max(self.now, coming[0][0])
            while coming and coming[0][0] <= self.now:
                assert self.scheduler.add(coming.pop(0)[1]) is None
            self._step()
        self.scheduler.check_idle()

    def _step(self) -> None:
        plan = self.scheduler.plan()
        assert plan, "this never ends"
        self.steps += 1
        seconds = STEP
        for entry in plan:
            middle = entry.sequence.computed + entry.count / 2
            seconds += ROW if entry.sequence.decoding else entry.count * (TOKEN + POSITION * middle)
        self.now += seconds
        for output in self.scheduler.commit(plan, [9 for entry in plan if entry.samples], seconds):
            if output.finish:
                self.took[output.id] = self.now - self._asked[output.id][0]


def alone(prompt: int, answer: int) -> float:
    """Return the seconds of one request that nothing runs beside."""
    world = World()
    number = world.ask(0.0, prompt, answer)
    world.run()
    return world.took[number]


@pytest.mark.parametrize(
    ("long", "short"),
    [([""], ""), (["a"], "b"), (["", ""], ""), (["a", "b"], "c"), (["a", "a", "a"], "a"), (["a", "b"], "a")],
)
def test_short_requests_beside_long_prompts_take_three_chunks_and_their_own_time(long: list[str], short: str) -> None:
    world = World()
    for principal in long:
        world.ask(0.0, LONG, 1, principal)
    shorts = [world.ask(0.2 + 0.9 * number, SHORT, principal=short) for number in range(40)]
    world.run()
    chunk = alone(LONG, 1) / (LONG / CHUNK)
    took = [world.took[number] for number in shorts]
    assert quantiles(took, n=20)[-1] <= 3 * chunk + alone(SHORT, ANSWER)
    assert max(took) <= 4 * chunk + alone(SHORT, ANSWER)


def test_short_requests_cost_a_long_prompt_little_more_than_their_own_time() -> None:
    world = World()
    long = world.ask(0.0, LONG, 1)
    count = int(alone(LONG, 1) / 2)
    for number in range(count):
        world.ask(0.2 + 2.0 * number, SHORT)
    world.run()
    assert world.took[long] <= 1.05 * (alone(LONG, 1) + count * alone(SHORT, ANSWER))


def test_a_long_prompt_gets_half_of_each_step_beside_a_crowd_of_short_ones() -> None:
    world = World()
    long = world.ask(0.0, LONG, 1)
    for number in range(200):
        world.ask(0.6 * number, 200, 1)
    world.run()
    assert world.took[long] <= 2.2 * alone(LONG, 1)


def test_a_long_prompt_that_waits_behind_another_is_read_next() -> None:
    world = World()
    first, second = world.ask(0.0, LONG, 1), world.ask(0.0, LONG, 1)
    for number in range(200):
        world.ask(0.6 * number, 200, 1)
    world.run()
    assert world.took[first] < world.took[second] <= 2.2 * 2 * alone(LONG, 1)


def test_a_prompt_whose_beginning_is_cached_counts_as_short() -> None:
    world = World()
    beginning = random.Random(5).choices(range(1000), k=4096)
    world.ask(0.0, beginning, 1)
    world.run()
    world.ask(world.now, LONG, 1)
    world.ask(world.now, 2048, 1)
    turn = world.ask(world.now + 0.1, [*beginning, *range(20)], 1)
    world.run()
    assert world.took[turn] <= 3 * alone(LONG, 1) / (LONG / CHUNK)


def test_prompts_of_equal_length_are_read_one_after_another() -> None:
    world = World()
    numbers = [world.ask(0.0, 2000, 1) for _ in range(5)]
    world.run()
    assert sorted(numbers, key=lambda number: world.took[number]) == numbers
