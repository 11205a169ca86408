"""Several principals in one batch: a light one is not held up by a heavy one's crowd, and nobody starves."""

import random
from statistics import median

import pytest
from simulation import SimulatedCache

from helexa.neuron.engine.ipc.messages import EngineOptions, Generate, SamplingParams
from helexa.neuron.engine.kv_cache.page_pool import PagePool
from helexa.neuron.engine.kv_cache.state_pool import StatePool
from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.scheduling.step_controller import StepController

PROMPT, ANSWER = 20, 24


class World:
    """Closed-loop clients before a scheduler, in a time that passes as a cost model says.

    Attributes:
        took: seconds of every finished request, by principal.
    """

    def __init__(
        self, clients: dict[str, int], *, base: float, row: float, token: float, noise: float = 0.0, **options: object
    ) -> None:
        self.scheduler = Scheduler(EngineOptions(speculation=False, **options), PagePool(2000, 16))  # type: ignore[arg-type]
        self.cost = (base, row, token)
        self.noise = noise
        self.random = random.Random(5)
        self.now = 0.0
        self.tokens = 0
        self.took: dict[str, list[float]] = {principal: [] for principal in clients}
        self._asked: dict[int, tuple[str, float]] = {}
        for principal, count in clients.items():
            for _ in range(count):
                self.ask(principal)

    def ask(self, principal: str, prompt_tokens: int = 0, answer: int = 0) -> None:
        number = len(self._asked)
        prompt = [number % 1000 + 1] * (prompt_tokens or self.random.randint(PROMPT // 2, 2 * PROMPT))
        answer = answer or (self.random.randint(ANSWER // 2, 2 * ANSWER) if principal == "heavy" else ANSWER)
        request = Generate(id=number, prompt=prompt, max_tokens=answer, sampling=SamplingParams(), salt=principal)
        self._asked[number] = (principal, self.now)
        assert self.scheduler.add(Sequence(request)) is None

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        assert plan, "this never ends"
        base, row, token = self.cost
        rows = sum(entry.sequence.decoding for entry in plan)
        seconds = base + row * rows + token * sum(e.count for e in plan if not e.sequence.decoding)
        seconds *= 1 + self.noise * self.random.random()
        self.now += seconds
        outputs = self.scheduler.commit(plan, [9 for entry in plan if entry.samples], seconds)
        for output in outputs:
            self.tokens += len(output.tokens)
            if output.finish:
                principal, asked = self._asked[output.id]
                self.took[principal].append(self.now - asked)
                self.ask(principal)
        return plan

    def run(self, light: int) -> None:
        """Until the light principal has had so many answers."""
        while len(self.took["light"]) < light:
            self.step()


COSTS = [
    pytest.param({"base": 0.010, "row": 0.002, "token": 0.001}, id="a CPU"),
    pytest.param({"base": 0.010, "row": 0.010, "token": 0.005}, id="a slow CPU"),
    pytest.param({"base": 0.010, "row": 0.00001, "token": 0.00001}, id="a GPU"),
    pytest.param({"base": 0.010, "row": 0.002, "token": 0.001, "noise": 0.5}, id="a busy CPU"),
]


@pytest.mark.parametrize("cost", COSTS)
def test_a_light_principal_waits_at_most_twice_as_long_as_beside_one_client(cost: dict[str, float]) -> None:
    beside_one = World({"heavy": 1, "light": 1}, **cost)
    beside_many = World({"heavy": 63, "light": 1}, **cost)
    beside_one.run(30)
    beside_many.run(30)
    assert median(beside_many.took["light"]) <= 2 * median(beside_one.took["light"])
    assert len(beside_many.took["heavy"]) >= 63 / 8


def test_where_rows_cost_nothing_nobody_is_held_back() -> None:
    world = World({"heavy": 63, "light": 1}, base=0.010, row=0.00001, token=0.00001)
    world.run(5)
    steps = [sum(entry.sequence.decoding for entry in world.step()) for _ in range(64)]
    assert median(steps) >= 50


def test_one_principal_alone_is_not_held_back() -> None:
    cost = {"base": 0.010, "row": 0.002, "token": 0.001}
    world = World({"heavy": 64}, **cost)
    for _ in range(300):
        decoding = {sequence for sequence in world.scheduler.running if sequence.decoding}
        assert decoding <= {entry.sequence for entry in world.step()}


@pytest.mark.parametrize("cost", COSTS)
def test_a_crowd_is_not_held_up_by_one_that_came_before(cost: dict[str, float]) -> None:
    """What few rows take is no measure for many: they would stay few."""
    world = World({"heavy": 1}, **cost)
    for _ in range(40):
        world.step()
    for _ in range(31):
        world.ask("heavy")
    rows = [sum(entry.sequence.decoding for entry in world.step()) for _ in range(600)]
    assert median(rows[300:]) >= 16


def test_steps_of_a_crowd_are_of_few_sizes() -> None:
    """A step of a size that was not there before is longer, as it has to be recorded."""
    world = World({"heavy": 120}, base=0.010, row=0.002, token=0.004, noise=0.5)
    for _ in range(200):
        world.step()
    sizes = [sum(entry.count for entry in world.step()) for _ in range(400)]
    assert sum(size % 8 == 0 for size in sizes) >= 300


def test_the_heavy_principals_sequences_take_turns() -> None:
    world = World({"heavy": 40, "light": 2}, base=0.010, row=0.002, token=0.0001)
    world.run(20)
    last: dict[Sequence, int] = {}
    longest = 0
    for number in range(400):
        for entry in world.step():
            longest = max(longest, number - last.get(entry.sequence, number))
            last[entry.sequence] = number
    assert longest <= 40
    assert len(world.took["heavy"]) > 20


@pytest.mark.parametrize("steady", [20, 400, 1000])
def test_a_long_prompt_goes_on_however_long_the_steps_before_were_alike(steady: int) -> None:
    world = World({}, base=0.010, row=0.00001, token=0.00001)
    for principal in ("heavy", "light"):
        world.ask(principal, answer=5000)
    for _ in range(steady):
        world.step()
    world.ask("heavy", prompt_tokens=9000, answer=5000)
    for _ in range(150):
        world.step()
    assert all(sequence.decoding for sequence in world.scheduler.running)


def test_principals_of_one_size_share_every_step() -> None:
    world = World({"light": 3, "b": 3, "c": 3}, base=0.010, row=0.010, token=0.001)
    for _ in range(100):
        decoding = {sequence for sequence in world.scheduler.running if sequence.decoding}
        assert decoding <= {entry.sequence for entry in world.step()}


def test_a_newcomers_prompt_goes_before_a_crowd_of_others() -> None:
    scheduler = Scheduler(EngineOptions(speculation=False, max_step_tokens=32), PagePool(2000, 16))
    for number in range(40):
        request = Generate(id=number, prompt=[5] * 30, max_tokens=9, sampling=SamplingParams(), salt="heavy")
        scheduler.add(Sequence(request))
    for _ in range(3):
        plan = scheduler.plan()
        scheduler.commit(plan, [9 for entry in plan if entry.samples], 0.01)
    scheduler.add(Sequence(Generate(id=99, prompt=[7] * 20, max_tokens=9, sampling=SamplingParams(), salt="light")))
    steps = 0
    while not any(sequence.id == 99 and sequence.decoding for sequence in scheduler.running):
        plan = scheduler.plan()
        scheduler.commit(plan, [9 for entry in plan if entry.samples], 0.01)
        steps += 1
    assert steps <= 2


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("recurrent", [False, True])
def test_tokens_are_the_same_and_everything_ends(seed: int, recurrent: bool) -> None:
    rng = random.Random(seed)
    states = StatePool(8, 6) if recurrent else None
    options = EngineOptions(max_step_tokens=rng.choice((4, 24, 64)), max_sequences=8, speculation=seed % 2 == 0)
    scheduler = Scheduler(options, PagePool(rng.choice((14, 60)), 4), states)
    cache = SimulatedCache(scheduler, lambda tokens: sum(tokens[-6:]) % 5)  # what it reads it checks
    expected: dict[int, int] = {}
    said: dict[int, list[int]] = {}
    for number in range(40):
        tokens = [rng.randrange(5) for _ in range(rng.randint(1, 20))]
        request = Generate(
            id=number,
            prompt=tokens,
            max_tokens=rng.randint(1, 20),
            sampling=SamplingParams(temperature=0),
            salt=rng.choice(("", "a", "a", "a", "a", "b")),
        )
        if scheduler.add(Sequence(request)) is None:
            expected[number] = min(request.max_tokens, 14 * 4 - len(tokens))
            said[number] = []
    steps = 0
    while not scheduler.idle:
        plan = scheduler.plan()
        assert plan
        rows = sum(entry.count for entry in plan)
        for output in scheduler.commit(plan, cache.run(plan), 0.001 * rows * rng.uniform(0.5, 1.5)):
            said[output.id] += output.tokens
        scheduler.check_idle()
        steps += 1
        assert steps < 5000
    assert {number: len(tokens) for number, tokens in said.items()} == expected


def test_the_least_recently_stepped_go_first() -> None:
    controller = StepController(EngineOptions())
    sequences = [
        Sequence(Generate(id=n, prompt=[1], max_tokens=9, sampling=SamplingParams(), salt="ab"[n > 3]))
        for n in range(5)
    ]
    seen: list[list[int]] = []
    for _ in range(4):
        controller.limits([], [])
        seen.append([sequence.id for sequence in controller.choose(sequences, 2)])
    assert seen == [[0, 4], [1, 4], [2, 4], [3, 4]]
