"""Fair share in one batch: many requests of one principal do not slow down another principal, and none starve."""

import random
from statistics import median

import pytest
from simulated_cache import SimulatedCache
from simulated_images import image, image_request

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool
from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.engine.scheduling.prompt_images import ImageTraits
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.scheduling.step_limits_and_fair_share import StepController

PROMPT, OUTPUT = 20, 24


class ClosedLoop:
    """Closed-loop clients of a scheduler. The duration of a step follows a linear cost model.

    Attributes:
        latencies: seconds of every finished request, by principal.
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
        self.latencies: dict[str, list[float]] = {principal: [] for principal in clients}
        self._sent: dict[int, tuple[str, float]] = {}
        for principal, count in clients.items():
            for _ in range(count):
                self.send(principal)

    def send(self, principal: str, prompt_tokens: int = 0, max_tokens: int = 0) -> None:
        number = len(self._sent)
        prompt = [number % 1000 + 1] * (prompt_tokens or self.random.randint(PROMPT // 2, 2 * PROMPT))
        max_tokens = max_tokens or (self.random.randint(OUTPUT // 2, 2 * OUTPUT) if principal == "heavy" else OUTPUT)
        request = Generate(id=number, prompt=prompt, max_tokens=max_tokens, sampling=SamplingParams(), salt=principal)
        self._sent[number] = (principal, self.now)
        assert self.scheduler.add(Sequence(request)) is None

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        assert plan, "the scheduler has requests but plans no step"
        base, row, token = self.cost
        rows = sum(entry.sequence.decoding for entry in plan)
        seconds = base + row * rows + token * sum(e.count for e in plan if not e.sequence.decoding)
        seconds *= 1 + self.noise * self.random.random()
        self.now += seconds
        outputs = self.scheduler.commit(plan, [9 for entry in plan if entry.samples], seconds)
        for output in outputs:
            self.tokens += len(output.tokens)
            if output.finish:
                principal, sent = self._sent[output.id]
                self.latencies[principal].append(self.now - sent)
                self.send(principal)
        return plan

    def run(self, light: int) -> None:
        """Run steps until `light` requests of the light principal have finished."""
        while len(self.latencies["light"]) < light:
            self.step()


COSTS = [
    pytest.param({"base": 0.010, "row": 0.002, "token": 0.001}, id="a CPU"),
    pytest.param({"base": 0.010, "row": 0.010, "token": 0.005}, id="a slow CPU"),
    pytest.param({"base": 0.010, "row": 0.00001, "token": 0.00001}, id="a GPU"),
    pytest.param({"base": 0.010, "row": 0.002, "token": 0.001, "noise": 0.5}, id="a busy CPU"),
]


@pytest.mark.parametrize("cost", COSTS)
def test_latency_of_one_client_at_most_doubles_beside_63_clients_of_another_principal(cost: dict[str, float]) -> None:
    beside_one = ClosedLoop({"heavy": 1, "light": 1}, **cost)
    beside_many = ClosedLoop({"heavy": 63, "light": 1}, **cost)
    beside_one.run(30)
    beside_many.run(30)
    assert median(beside_many.latencies["light"]) <= 2 * median(beside_one.latencies["light"])
    assert len(beside_many.latencies["heavy"]) >= 63 / 8


def test_all_sequences_decode_in_each_step_if_batch_rows_add_little_time() -> None:
    loop = ClosedLoop({"heavy": 63, "light": 1}, base=0.010, row=0.00001, token=0.00001)
    loop.run(5)
    steps = [sum(entry.sequence.decoding for entry in loop.step()) for _ in range(64)]
    assert median(steps) >= 50


def test_all_sequences_of_a_single_principal_decode_in_every_step() -> None:
    cost = {"base": 0.010, "row": 0.002, "token": 0.001}
    loop = ClosedLoop({"heavy": 64}, **cost)
    for _ in range(300):
        decoding = {sequence for sequence in loop.scheduler.running if sequence.decoding}
        assert decoding <= {entry.sequence for entry in loop.step()}


@pytest.mark.parametrize("cost", COSTS)
def test_batch_size_grows_with_load_although_only_small_batches_were_measured(cost: dict[str, float]) -> None:
    """The step controller must not keep a batch small because it has measured only small batches."""
    loop = ClosedLoop({"heavy": 1}, **cost)
    for _ in range(40):
        loop.step()
    for _ in range(31):
        loop.send("heavy")
    rows = [sum(entry.sequence.decoding for entry in loop.step()) for _ in range(600)]
    assert median(rows[300:]) >= 16


def test_most_steps_have_a_token_count_that_is_a_multiple_of_eight() -> None:
    """Step sizes repeat, because a step of a new size is slower: its graph must be captured."""
    loop = ClosedLoop({"heavy": 120}, base=0.010, row=0.002, token=0.004, noise=0.5)
    for _ in range(200):
        loop.step()
    sizes = [sum(entry.count for entry in loop.step()) for _ in range(400)]
    assert sum(size % 8 == 0 for size in sizes) >= 300


def test_sequences_of_a_principal_with_many_requests_decode_in_turns() -> None:
    loop = ClosedLoop({"heavy": 40, "light": 2}, base=0.010, row=0.002, token=0.0001)
    loop.run(20)
    last: dict[Sequence, int] = {}
    longest = 0
    for number in range(400):
        for entry in loop.step():
            longest = max(longest, number - last.get(entry.sequence, number))
            last[entry.sequence] = number
    assert longest <= 40
    assert len(loop.latencies["heavy"]) > 20


@pytest.mark.parametrize("steps_before", [20, 400, 1000])
def test_long_prompt_advances_beside_decoding_after_any_number_of_equal_steps(steps_before: int) -> None:
    loop = ClosedLoop({}, base=0.010, row=0.00001, token=0.00001)
    for principal in ("heavy", "light"):
        loop.send(principal, max_tokens=5000)
    for _ in range(steps_before):
        loop.step()
    loop.send("heavy", prompt_tokens=9000, max_tokens=5000)
    for _ in range(150):
        loop.step()
    assert all(sequence.decoding for sequence in loop.scheduler.running)


def test_principals_with_equally_many_sequences_all_run_in_every_step() -> None:
    loop = ClosedLoop({"light": 3, "b": 3, "c": 3}, base=0.010, row=0.010, token=0.001)
    for _ in range(100):
        decoding = {sequence for sequence in loop.scheduler.running if sequence.decoding}
        assert decoding <= {entry.sequence for entry in loop.step()}


def test_prompt_of_a_new_principal_runs_before_queued_prompts_of_a_busy_principal() -> None:
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


def test_image_that_exceeds_the_limit_of_a_busy_principal_leaves_its_other_prompts_no_tokens() -> None:
    """The image must be computed in one step, so it takes more tokens than the limit of its principal."""
    scheduler = Scheduler(EngineOptions(speculation=False), PagePool(2000, 16), image_traits=ImageTraits(whole=True))
    for number in range(2):
        scheduler.add(Sequence(image_request(number, [image(number, 100), [5] * 100], salt="heavy")))
    scheduler.add(Sequence(Generate(id=9, prompt=[7] * 20, max_tokens=9, sampling=SamplingParams(), salt="light")))
    plan = scheduler.plan()
    assert [(entry.sequence.id, entry.count) for entry in plan] == [(0, 100), (9, 20)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("recurrent", [False, True])
def test_random_requests_of_several_principals_all_finish(seed: int, recurrent: bool) -> None:
    rng = random.Random(seed)
    states = StatePool(8, 6) if recurrent else None
    options = EngineOptions(max_step_tokens=rng.choice((4, 24, 64)), max_sequences=8, speculation=seed % 2 == 0)
    scheduler = Scheduler(options, PagePool(rng.choice((14, 60)), 4), states)
    cache = SimulatedCache(scheduler, lambda tokens: sum(tokens[-6:]) % 5)  # checks all slots that are read
    expected: dict[int, int] = {}
    outputs: dict[int, list[int]] = {}
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
            outputs[number] = []
    steps = 0
    while not scheduler.idle:
        plan = scheduler.plan()
        assert plan
        rows = sum(entry.count for entry in plan)
        for output in scheduler.commit(plan, cache.run(plan), 0.001 * rows * rng.uniform(0.5, 1.5)):
            outputs[output.id] += output.tokens
        scheduler.check_idle()
        steps += 1
        assert steps < 5000
    assert {number: len(tokens) for number, tokens in outputs.items()} == expected


def test_sequences_that_have_waited_longest_run_in_the_next_step() -> None:
    controller = StepController(EngineOptions())
    sequences = [
        Sequence(Generate(id=n, prompt=[1], max_tokens=9, sampling=SamplingParams(), salt="ab"[n > 3]))
        for n in range(5)
    ]
    chosen: list[list[int]] = []
    for _ in range(4):
        controller.limits([], [])
        chosen.append([sequence.id for sequence in controller.choose(sequences, 2)])
    assert chosen == [[0, 4], [1, 4], [2, 4], [3, 4]]
