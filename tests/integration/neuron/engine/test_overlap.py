"""Overlapping steps: a step launched before the previous step is read gives the same results as without overlap."""

import gc
import logging
import random
import weakref
from collections import Counter

import pytest
import torch
from simulated_cache import SimulatedStep
from simulated_runner import FATAL, FATAL_LATE, NOT_FINITE, STOP, SimulatedRunner

from helexa.neuron.engine import loop
from helexa.neuron.engine.execution import device_errors
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Embed, Generate, Pooling, SamplingParams, TokenOutput
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool
from helexa.neuron.engine.loop import Steps, _finite_vectors
from helexa.neuron.engine.scheduling.ngrams_and_counts import Drafter
from helexa.neuron.engine.scheduling.plan import Plan, PlanEntry
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_input_and_graph_sizes import HiddenRows
from helexa.neuron.engine.step_output_logprobs_and_pooling import StepInFlight, begin_sums

PAGE, SEQUENCES, SNAPSHOTS = 4, 8, 6
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(autouse=True)
def _steps_are_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "build_step", lambda plan, *rest: plan)


class Simulation:
    """A scheduler with a simulated runner, and the outputs of the requests."""

    def __init__(self, overlap: bool, hybrid: bool = False, pages: int = 80, **options: object) -> None:
        engine_options = EngineOptions(
            **{"max_step_tokens": 24, "max_sequences": SEQUENCES, "max_waiting": 100, "speculation": False} | options  # type: ignore[arg-type]
        )
        self.states = StatePool(SEQUENCES, SNAPSHOTS) if hybrid else None
        self.scheduler = Scheduler(engine_options, PagePool(pages, PAGE), self.states)
        self.runner = SimulatedRunner(self.scheduler)
        self.steps = Steps(self.runner, self.scheduler, overlap)  # type: ignore[arg-type]
        self._preempt, self.scheduler.queues.preempt = self.scheduler.queues.preempt, self.preempt  # type: ignore[method-assign]
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str | None] = {}

    def run(self, requests: list[Generate], cancels: dict[int, int] | None = None) -> None:
        """Add requests one by one and run until they end.

        Args:
            cancels: number of output tokens after which a request is canceled, by request id.
        """
        waiting, rounds = list(requests), 0
        while waiting or not self.steps.idle:
            if waiting and rounds % 2 == 0:
                assert self.scheduler.add(Sequence(waiting.pop(0))) is None
            for number, count in (cancels or {}).items():
                if len(self.tokens.get(number, ())) >= count:
                    self.scheduler.cancel(number)
            rounds += 1
            assert rounds < 5000, "the requests do not end"
            for output in self.steps.advance():
                self.take(output)
        self.scheduler.check_idle()

    def preempt(self, sequence: Sequence) -> None:
        assert not self.scheduler.planner._ahead, "the step of the preempted sequence is in flight"
        self._preempt(sequence)

    def take(self, output: TokenOutput) -> None:
        assert self.ends.get(output.id) is None, "output after the last output"
        self.tokens.setdefault(output.id, []).extend(output.tokens)
        self.ends[output.id] = output.finish


def requests(chance: random.Random, count: int, bad: tuple[int, ...] = ()) -> list[Generate]:
    generated = []
    for number in range(count):
        prompt = [20] * chance.randrange(1, 14) + [30 + number] * chance.randrange(1, 20)
        if bad and chance.random() < 0.25:
            prompt.insert(chance.randrange(len(prompt)), chance.choice(bad))
        sampling = GREEDY if chance.random() < 0.8 else SamplingParams(temperature=0, repetition_penalty=1.5)
        limit = chance.randrange(1, 24)
        generated.append(Generate(id=number, prompt=prompt, max_tokens=limit, sampling=sampling, stop_ids=[STOP]))
    return generated


@pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
@pytest.mark.parametrize("pages", [80, 22], ids=["all pages", "preempted"])
@pytest.mark.parametrize("seed", range(4))
def test_outputs_with_and_without_overlapping_steps_are_equal(hybrid: bool, pages: int, seed: int):
    inputs = requests(random.Random(seed), 16)
    plain, ahead = Simulation(False, hybrid, pages), Simulation(True, hybrid, pages)
    plain.run(inputs)
    ahead.run(inputs)
    assert (ahead.tokens, ahead.ends) == (plain.tokens, plain.ends)
    assert plain.runner.ahead == 0
    assert ahead.runner.ahead > 5
    assert set(plain.ends.values()) == {"stop", "length"}


@pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
@pytest.mark.parametrize("seed", range(6))
def test_failed_and_canceled_requests_change_no_output_with_overlapping_steps(
    hybrid: bool, seed: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(device_errors, "_MOST_STRIKES", 100)  # many of the few running requests are bad
    chance = random.Random(seed)
    inputs = requests(chance, 20, (FATAL, FATAL, FATAL, NOT_FINITE))
    bad = {message.id for message in inputs if {FATAL, NOT_FINITE} & set(message.prompt)}
    cancels = {number: chance.randrange(1, 6) for number in chance.sample(range(20), 5)}
    plain, ahead = Simulation(False, hybrid), Simulation(True, hybrid, pages=(80, 26)[seed % 2])
    plain.run([message for message in inputs if message.id not in bad])
    ahead.run(inputs, cancels)
    assert ahead.runner.ahead
    assert {number for number, end in ahead.ends.items() if end == "error"} == bad
    for number in set(plain.ends) - set(cancels):
        assert ahead.tokens[number] == plain.tokens[number]
    for number in set(cancels) - bad:
        assert ahead.tokens[number] == plain.tokens[number][: len(ahead.tokens[number])]


def test_overlapping_steps_compute_no_extra_token_at_a_known_length_limit():
    plain, ahead = Simulation(False), Simulation(True)
    for simulation in (plain, ahead):
        simulation.runner.next_token = lambda tokens: 10
        simulation.run([Generate(id=n, prompt=[20] * (n + 1), max_tokens=3 + n, sampling=GREEDY) for n in range(5)])
    assert ahead.tokens == plain.tokens
    assert sum(map(len, ahead.tokens.values())) == ahead.runner.entries == plain.runner.entries
    simulation = Simulation(True, context_length=12)
    simulation.runner.next_token = lambda tokens: 10
    simulation.run([Generate(id=0, prompt=[20] * 5, max_tokens=30, sampling=GREEDY)])
    assert (len(simulation.tokens[0]), simulation.runner.entries) == (7, 7)


def test_request_with_non_finite_logits_does_not_change_the_result_of_an_ended_request():
    simulation = Simulation(True)
    simulation.runner.next_token = lambda tokens: STOP if len(tokens) > 1 else 10
    simulation.scheduler.add(Sequence(Generate(id=0, prompt=[20], max_tokens=9, sampling=GREEDY, stop_ids=[STOP])))
    for output in simulation.steps.advance():
        simulation.take(output)
    simulation.run([Generate(id=1, prompt=[NOT_FINITE], max_tokens=9, sampling=GREEDY)])
    assert (simulation.tokens[0], simulation.ends) == ([10, STOP], {0: "stop", 1: "error"})


def test_step_that_runs_out_of_memory_releases_its_tensors(monkeypatch: pytest.MonkeyPatch):
    """The traceback of the error must not keep the tensors alive, because the next step needs their memory."""
    monkeypatch.setattr(
        logging.getLogger("helexa.neuron.engine"), "disabled", True
    )  # pytest keeps log records, and so their exceptions
    references: list[weakref.ref[torch.Tensor]] = []
    simulation = Simulation(True)
    simulation.runner.device = torch.device("cpu")
    launch = simulation.runner.launch

    def run_out(plan: Plan, after: SimulatedStep | None = None, keep: bool = False) -> SimulatedStep:
        if len(plan[0].sequence.tokens) < 3:
            return launch(plan, after)
        tensor = torch.zeros(3)
        references.append(weakref.ref(tensor))
        try:
            raise KeyError
        except KeyError:
            raise torch.OutOfMemoryError from None

    monkeypatch.setattr(simulation.runner, "launch", run_out)
    gc.disable()
    try:
        simulation.run([Generate(id=0, prompt=[20], max_tokens=9, sampling=GREEDY)])
    finally:
        gc.enable()
    assert simulation.ends == {0: "error"}
    assert references
    assert all(reference() is None for reference in references)


def embedding(number: int, computed: int, pooling: Pooling) -> Sequence:
    """Return an embedding sequence of six tokens, of which `computed` are computed."""
    sequence = Sequence.to_embed(Embed(id=number, prompt=[20] * 6, pooling=pooling))
    sequence.pages, sequence.computed = [number], computed
    return sequence


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_canceling_a_sequence_does_not_change_the_embedding_of_another_sequence(pooling: Pooling):
    """The step in flight has hidden states of both sequences, also of the canceled one."""
    canceled, remaining = embedding(0, 3, pooling), embedding(1, 0, pooling)
    plan = [PlanEntry(canceled, 3), PlanEntry(remaining, 6)]
    wanted = [seq.pooled.wanted(seq.computed, 6) for seq in (canceled, remaining) if seq.pooled is not None]
    hidden = torch.cat([torch.full((len(rows), 2), number + 1.0) for number, rows in enumerate(wanted)])
    rows = [HiddenRows(s.id, len(r)) for s, r in zip((canceled, remaining), wanted, strict=True) if r]
    step = StepInFlight(hidden=begin_sums(rows, hidden))
    canceled.pages, canceled.computed = [], 0
    outcome = step.read()
    assert outcome.hidden[1].tolist() == [2.0 * len(wanted[1])] * 2
    assert _finite_vectors(plan, outcome) == [True], "one result: the remaining sequence's"


def test_step_launched_after_a_failed_step_is_computed_again():
    simulation = Simulation(True, hybrid=True)
    prompt = [20] * 13 + [30] * 4
    simulation.run([Generate(id=0, prompt=prompt, max_tokens=8, sampling=GREEDY)])
    simulation.scheduler.add(Sequence(Generate(id=1, prompt=[FATAL_LATE] * 25, max_tokens=8, sampling=GREEDY)))
    assert simulation.steps.advance() == []  # half of the prompt; the step of the other half is in flight and fails
    simulation.scheduler.add(
        Sequence(Generate(id=2, prompt=prompt, max_tokens=8, sampling=GREEDY))
    )  # starts from a snapshot
    simulation.run([])
    assert (simulation.tokens[1], simulation.ends[1]) == ([], "error")
    assert simulation.tokens[2] == simulation.tokens[0]
    assert simulation.scheduler.queues.cached_tokens > 0


def test_steps_overlap_only_if_no_sequence_can_have_drafts():
    repeating = Generate(id=0, prompt=[20, 21, 22, 23, 24, 25] * 4, max_tokens=40, sampling=GREEDY)
    simulation = Simulation(True, speculation=True, max_step_tokens=64)
    simulation.runner.next_token = lambda tokens: tokens[-6]
    simulation.run([repeating])
    assert simulation.runner.ahead == 0, "steps overlapped although drafts were possible"
    simulation = Simulation(True, speculation=True)
    simulation.run([Generate(id=0, prompt=[20], max_tokens=20, sampling=GREEDY)])
    assert simulation.runner.ahead > 10


@pytest.mark.parametrize("seed", range(3))
def test_function_may_draft_is_true_for_every_text_that_gets_a_draft(seed: int):
    chance = random.Random(seed)
    outcomes: Counter[bool] = Counter()
    for _ in range(300):
        tokens = [chance.randrange(4) for _ in range(chance.randrange(3, 30))] * chance.choice((1, 1, 2, 3))
        drafter = Drafter(tokens)
        drafter._match = chance.choice((3, 4, 5, 8, 9, 10, 16))
        may_draft = drafter.may_draft
        tokens.append(chance.choice((chance.randrange(4), tokens[len(tokens) // 2])))
        drafted = bool(drafter.draft(4))
        assert may_draft or not drafted
        outcomes[may_draft] += 1
    assert min(outcomes.values()) > 10


def test_function_may_draft_requires_a_longer_match_after_rejected_drafts():
    tokens = [*range(20), 5, 6, 7]
    drafter = Drafter(tokens)
    assert drafter.may_draft
    drafter.learn(4, 0)
    assert not drafter.may_draft
    tokens += range(8, 13)
    assert drafter.may_draft, "eight tokens match"
