"""Steps that are launched before the one before them is read bring what they bring one by one."""

import gc
import logging
import random
import weakref
from collections import Counter

import pytest
import torch
from simulation import SimulatedCache, SimulatedStep

from helexa.neuron.engine import steps
from helexa.neuron.engine.execution import device_errors
from helexa.neuron.engine.execution.step_in_flight import StepInFlight, begin_sums
from helexa.neuron.engine.ipc.messages import Embed, EngineOptions, Generate, Pooling, SamplingParams, TokenOutput
from helexa.neuron.engine.kv_cache.page_pool import PagePool
from helexa.neuron.engine.kv_cache.state_pool import StatePool
from helexa.neuron.engine.sampling.sampler import Refused
from helexa.neuron.engine.scheduling.ngram import Drafter
from helexa.neuron.engine.scheduling.plan import Plan, PlanEntry
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step.step_input import HiddenRows
from helexa.neuron.engine.step.step_output import StepOutput
from helexa.neuron.engine.steps import Steps, _sound_vectors
from helexa.neuron.ops.batch import Bucket
from helexa.neuron.ops.constants import NON_FINITE

FATAL_LATE, FATAL, NOT_A_NUMBER, STOP = 6, 7, 8, 9
PAGE, SEQUENCES, SNAPSHOTS = 4, 8, 6
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(autouse=True)
def _steps_are_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "build_step", lambda plan, buckets: plan)


def next_token(tokens: list[int]) -> int:
    """One of many, now and then the one that ends an answer."""
    return STOP if sum(tokens) % 11 == 3 else 10 + sum(tokens) % 40


class Simulated(SimulatedCache):
    """A runner that fails, or says what is no number, where a prompt tells it to; counts what is launched ahead."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler, next_token)
        self.device: torch.device | None = None
        self.buckets: list[Bucket] = []
        self.ahead = 0
        self.entries = 0
        self.cleared: list[int] = []

    def launch(self, plan: Plan, after: SimulatedStep | None = None) -> SimulatedStep:
        if any(FATAL in entry.sequence.tokens for entry in plan):
            raise ValueError("of no consequence")
        step = super().launch(plan, after)
        rows = [entry for entry in plan if entry.samples for _ in range(len(entry.drafts) + 1)]
        spoilt = [NOT_A_NUMBER in entry.sequence.tokens for entry in rows]
        self.ahead += after is not None
        self.entries += len(plan)
        if any(FATAL_LATE in entry.sequence.tokens and entry.samples for entry in plan):
            return Late(step.tokens)
        return SimulatedStep([NON_FINITE if bad else token for bad, token in zip(spoilt, step.tokens, strict=True)])

    def clear(self, pages: list[int]) -> None:
        self.cleared += pages

    def computes_finite_logits(self, page: int, slot: int | None) -> bool:
        return True


class Late(SimulatedStep):
    """One that is found to have failed when it is read."""

    def read(self, refused: Refused) -> StepOutput:
        raise ValueError("of no consequence")


class World:
    """A scheduler, a runner and what came of the requests."""

    def __init__(self, overlap: bool, hybrid: bool = False, pages: int = 80, **options: object) -> None:
        built = EngineOptions(
            **{"max_step_tokens": 24, "max_sequences": SEQUENCES, "max_waiting": 100, "speculation": False} | options  # type: ignore[arg-type]
        )
        self.states = StatePool(SEQUENCES, SNAPSHOTS) if hybrid else None
        self.scheduler = Scheduler(built, PagePool(pages, PAGE), self.states)
        self.runner = Simulated(self.scheduler)
        self.steps = Steps(self.runner, self.scheduler, overlap)  # type: ignore[arg-type]
        self._preempt, self.scheduler.queues.preempt = self.scheduler.queues.preempt, self.preempt  # type: ignore[method-assign]
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str | None] = {}

    def run(self, requests: list[Generate], cancels: dict[int, int] | None = None) -> None:
        """Requests come one by one; after so many tokens of its own, one is cancelled."""
        waiting, rounds = list(requests), 0
        while waiting or not self.steps.idle:
            if waiting and rounds % 2 == 0:
                assert self.scheduler.add(Sequence(waiting.pop(0))) is None
            for number, count in (cancels or {}).items():
                if len(self.tokens.get(number, ())) >= count:
                    self.scheduler.cancel(number)
            rounds += 1
            assert rounds < 5000, "this never ends"
            for output in self.steps.advance():
                self.take(output)
            self.scheduler.check_idle()
        assert self.scheduler.pages.free == self.scheduler.pages.total
        if self.states is not None:
            assert len(self.states._live) == SEQUENCES
            assert len(self.states._empty) + self.states.snapshots == SNAPSHOTS, "a slot for a snapshot is lost"

    def preempt(self, sequence: Sequence) -> None:
        assert not self.scheduler.planner._ahead, "its step is still under way"
        self._preempt(sequence)

    def take(self, output: TokenOutput) -> None:
        assert self.ends.get(output.id) is None, "it has ended already"
        self.tokens.setdefault(output.id, []).extend(output.tokens)
        self.ends[output.id] = output.finish


def requests(chance: random.Random, count: int, bad: tuple[int, ...] = ()) -> list[Generate]:
    made = []
    for number in range(count):
        prompt = [20] * chance.randrange(1, 14) + [30 + number] * chance.randrange(1, 20)
        if bad and chance.random() < 0.25:
            prompt.insert(chance.randrange(len(prompt)), chance.choice(bad))
        sampling = GREEDY if chance.random() < 0.8 else SamplingParams(temperature=0, repetition_penalty=1.5)
        limit = chance.randrange(1, 24)
        made.append(Generate(id=number, prompt=prompt, max_tokens=limit, sampling=sampling, stop_ids=[STOP]))
    return made


@pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
@pytest.mark.parametrize("pages", [80, 22], ids=["room", "preempted"])
@pytest.mark.parametrize("seed", range(4))
def test_the_answers_are_the_same(hybrid: bool, pages: int, seed: int):
    asked = requests(random.Random(seed), 16)
    plain, ahead = World(False, hybrid, pages), World(True, hybrid, pages)
    plain.run(asked)
    ahead.run(asked)
    assert (ahead.tokens, ahead.ends) == (plain.tokens, plain.ends)
    assert plain.runner.ahead == 0
    assert ahead.runner.ahead > 5
    assert set(plain.ends.values()) == {"stop", "length"}


@pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
@pytest.mark.parametrize("seed", range(6))
def test_failures_and_cancels_meanwhile_touch_nobody_else(hybrid: bool, seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_errors, "_MOST_STRIKES", 100)  # few run, and many of them are bad
    chance = random.Random(seed)
    asked = requests(chance, 20, (FATAL, FATAL, FATAL, NOT_A_NUMBER))
    bad = {one.id for one in asked if {FATAL, NOT_A_NUMBER} & set(one.prompt)}
    cancels = {number: chance.randrange(1, 6) for number in chance.sample(range(20), 5)}
    quiet, ahead = World(False, hybrid), World(True, hybrid, pages=(80, 26)[seed % 2])
    quiet.run([one for one in asked if one.id not in bad])
    ahead.run(asked, cancels)
    assert ahead.runner.ahead
    assert {number for number, end in ahead.ends.items() if end == "error"} == bad
    for number in set(quiet.ends) - set(cancels):
        assert ahead.tokens[number] == quiet.tokens[number]
    for number in set(cancels) - bad:
        assert ahead.tokens[number] == quiet.tokens[number][: len(ahead.tokens[number])]


def test_who_is_known_to_end_has_no_row_too_many():
    plain, ahead = World(False), World(True)
    for world in (plain, ahead):
        world.runner.next_token = lambda tokens: 10
        world.run([Generate(id=n, prompt=[20] * (n + 1), max_tokens=3 + n, sampling=GREEDY) for n in range(5)])
    assert ahead.tokens == plain.tokens
    assert sum(map(len, ahead.tokens.values())) == ahead.runner.entries == plain.runner.entries
    world = World(True, context_length=12)
    world.runner.next_token = lambda tokens: 10
    world.run([Generate(id=0, prompt=[20] * 5, max_tokens=30, sampling=GREEDY)])
    assert (len(world.tokens[0]), world.runner.entries) == (7, 7)


def test_one_that_is_no_numbers_beside_one_that_has_ended_is_no_broken_device():
    world = World(True)
    world.runner.next_token = lambda tokens: STOP if len(tokens) > 1 else 10
    world.scheduler.add(Sequence(Generate(id=0, prompt=[20], max_tokens=9, sampling=GREEDY, stop_ids=[STOP])))
    for output in world.steps.advance():
        world.take(output)
    world.run([Generate(id=1, prompt=[NOT_A_NUMBER], max_tokens=9, sampling=GREEDY)])
    assert (world.tokens[0], world.ends) == ([10, STOP], {0: "stop", 1: "error"})


def test_a_step_that_failed_keeps_nothing_of_what_it_had(monkeypatch: pytest.MonkeyPatch):
    """Least of all one that ran out of memory, whether it was launched ahead or not."""
    monkeypatch.setattr(logging.getLogger("helexa.neuron.engine"), "disabled", True)  # pytest keeps what is logged
    kept: list[weakref.ref[torch.Tensor]] = []
    world = World(True)
    world.runner.device = torch.device("cpu")
    launch = world.runner.launch

    def run_out(plan: Plan, after: SimulatedStep | None = None) -> SimulatedStep:
        if len(plan[0].sequence.tokens) < 3:
            return launch(plan, after)
        numbers = torch.zeros(3)
        kept.append(weakref.ref(numbers))
        try:
            raise KeyError
        except KeyError:
            raise torch.OutOfMemoryError from None

    monkeypatch.setattr(world.runner, "launch", run_out)
    gc.disable()
    try:
        world.run([Generate(id=0, prompt=[20], max_tokens=9, sampling=GREEDY)])
    finally:
        gc.enable()
    assert world.ends == {0: "error"}
    assert kept
    assert all(one() is None for one in kept)


def embedding(number: int, computed: int, pooling: Pooling) -> Sequence:
    """One whose prompt of six tokens is computed so far."""
    sequence = Sequence.to_embed(Embed(id=number, prompt=[20] * 6, pooling=pooling))
    sequence.pages, sequence.computed = [number], computed
    return sequence


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_a_vector_does_not_depend_on_who_is_cancelled_before_it_is_read(pooling: Pooling):
    """The rows of the others lie where they lay."""
    cancelled, other = embedding(0, 3, pooling), embedding(1, 0, pooling)
    plan = [PlanEntry(cancelled, 3), PlanEntry(other, 6)]
    wanted = [one.pooled.wanted(one.computed, 6) for one in (cancelled, other) if one.pooled is not None]
    hidden = torch.cat([torch.full((len(rows), 2), number + 1.0) for number, rows in enumerate(wanted)])
    rows = [HiddenRows(one.id, len(own)) for one, own in zip((cancelled, other), wanted, strict=True) if own]
    step = StepInFlight(hidden=begin_sums(rows, hidden))
    cancelled.pages, cancelled.computed = [], 0
    outcome = step.read()
    assert outcome.hidden[1].tolist() == [2.0 * len(wanted[1])] * 2
    assert _sound_vectors(plan, outcome) == [True], "of the one that is left"


def test_what_was_launched_after_a_step_that_failed_is_computed_anew():
    world = World(True, hybrid=True)
    prompt = [20] * 13 + [30] * 4
    world.run([Generate(id=0, prompt=prompt, max_tokens=8, sampling=GREEDY)])
    world.scheduler.add(Sequence(Generate(id=1, prompt=[FATAL_LATE] * 25, max_tokens=8, sampling=GREEDY)))
    assert world.steps.advance() == []  # half of its prompt; the other half is under way, and will fail
    world.scheduler.add(Sequence(Generate(id=2, prompt=prompt, max_tokens=8, sampling=GREEDY)))  # from a snapshot
    world.run([])
    assert (world.tokens[1], world.ends[1]) == ([], "error")
    assert world.tokens[2] == world.tokens[0]
    assert world.scheduler.queues.cached_tokens > 0


def test_guesses_are_made_where_there_may_be_some_and_steps_overlap_elsewhere():
    alike = Generate(id=0, prompt=[20, 21, 22, 23, 24, 25] * 4, max_tokens=40, sampling=GREEDY)
    world = World(True, speculation=True, max_step_tokens=64)
    world.runner.next_token = lambda tokens: tokens[-6]
    world.run([alike])
    assert world.runner.ahead == 0, "it could have been guessed"
    world = World(True, speculation=True)
    world.run([Generate(id=0, prompt=[20], max_tokens=20, sampling=GREEDY)])
    assert world.runner.ahead > 10


@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_sees_no_draft_coming_has_none_whatever_comes(seed: int):
    chance = random.Random(seed)
    seen: Counter[bool] = Counter()
    for _ in range(300):
        tokens = [chance.randrange(4) for _ in range(chance.randrange(3, 30))] * chance.choice((1, 1, 2, 3))
        drafter = Drafter(tokens)
        drafter._match = chance.choice((3, 4, 5, 8, 9, 10, 16))
        coming = drafter.may_draft
        tokens.append(chance.choice((chance.randrange(4), tokens[len(tokens) // 2])))
        found = bool(drafter.draft(4))
        assert coming or not found
        seen[coming] += 1
    assert min(seen.values()) > 10


def test_after_failed_drafts_steps_overlap_where_only_a_short_match_promises_another():
    tokens = [*range(20), 5, 6, 7]
    drafter = Drafter(tokens)
    assert drafter.may_draft
    drafter.learn(4, 0)
    assert not drafter.may_draft
    tokens += range(8, 13)
    assert drafter.may_draft, "eight tokens match"
