"""The draft gate, with simulated durations: gains where drafts pay, and a bounded cost where they do not."""

import random

import pytest

from helexa.neuron.engine.scheduling.draft_length import Acceptance, Candidate, DraftGate, ModelDrafter

_ROWS = {1: 1.0, 2: 1.06, 4: 1.48, 6: 2.27, 8: 3.15, 16: 5.8, 64: 20.0, 512: 150.0}  # as measured with a 1.5B model


def seconds(rows: int, scale: float) -> float:
    """Return the duration of a pass: rows are padded to the sizes of `_ROWS`."""
    return scale * next(cost for size, cost in _ROWS.items() if rows <= size)


class Simulation:
    """Decodes with a draft model whose passes take `ratio` times as long as those of the model."""

    def __init__(self, ratio: float, sequences: int = 1, noise: float = 0.0) -> None:
        self.gate = DraftGate(ratio)
        self.chance = random.Random(1)
        self.seconds = 0.0
        self.drafted = self.tokens = 0
        self._ratio, self._noise = ratio, noise
        self._drafters = [ModelDrafter(self.gate) for _ in range(sequences)]
        self._lengths = [300] * sequences

    def run(self, steps: int, acceptance: float) -> float:
        """Decode and return tokens per second, as a multiple of those without drafts."""
        begun, tokens = self.seconds, self.tokens
        for _ in range(steps):
            self._step(acceptance)
        sequences = len(self._drafters)
        return (self.tokens - tokens) / sequences * seconds(sequences, 0.036) / (self.seconds - begun)

    def _step(self, acceptance: float) -> None:
        pairs = list(zip(self._drafters, self._lengths, strict=True))
        missing = {drafter: min(length - drafter.end, 64) for drafter, length in pairs}
        candidates = [Candidate(drafter, missing[drafter], 9, length - 300) for drafter, length in pairs]
        count, chosen = (0, []) if self.gate.rests else self.gate.choose(candidates, len(pairs))
        for done in range(count):
            rows = len(chosen) if done else sum(missing[drafter] for drafter in chosen)
            self.gate.learn_pass(rows, self._take(seconds(rows, 0.036 * self._ratio)))
        rows = len(pairs) + count * len(chosen)
        self.gate.learn_step(rows, self._take(seconds(rows, 0.036)))
        for index, drafter in enumerate(self._drafters):
            accepted = 0
            if drafter in chosen:
                drafter.passes, drafter.end = count, self._lengths[index]
                while accepted < count and self.chance.random() < acceptance:
                    accepted += 1
                drafter.learn(count, accepted)
                self.drafted += count
            self._lengths[index] += accepted + 1
            self.tokens += accepted + 1

    def _take(self, duration: float) -> float:
        duration *= 1 + self._noise * self.chance.random()
        self.seconds += duration
        return duration


@pytest.mark.parametrize(("ratio", "sequences"), [(0.45, 1), (0.1, 1), (0.02, 1), (0.45, 4)])
def test_drafts_that_are_never_accepted_cost_at_most_3_percent_of_the_time(ratio: float, sequences: int) -> None:
    assert Simulation(ratio, sequences).run(600, acceptance=0.0) >= 0.97


def test_small_draft_model_that_never_helps_costs_at_most_3_percent_of_a_short_answer() -> None:
    assert Simulation(0.02).run(100, acceptance=0.0) >= 0.97


def test_draft_gate_doubles_its_pauses_while_all_drafts_are_rejected() -> None:
    simulation = Simulation(0.02)
    rests: list[int] = []
    for _ in range(3000):
        before = simulation.gate.rests
        simulation.run(1, acceptance=0.0)
        if simulation.gate.rests:
            rests = [*rests[:-1], rests[-1] + 1] if before else [*rests, 1]
    lengths = [31, 63, 127, 255, 511, 511, 511]  # without the step that begins a rest
    assert rests[: len(lengths)] == lengths
    assert simulation.drafted < 60


@pytest.mark.parametrize(
    ("ratio", "acceptance", "gain"), [(0.45, 0.97, 1.2), (0.45, 0.89, 1.08), (0.1, 0.7, 1.25), (0.02, 0.9, 1.9)]
)
def test_draft_gate_reaches_the_speedup_that_cost_and_acceptance_rate_allow(
    ratio: float, acceptance: float, gain: float
) -> None:
    simulation = Simulation(ratio)
    assert simulation.run(600, acceptance) >= gain
    assert simulation.gate.gain >= gain * 0.9


def test_draft_gate_permits_few_drafts_if_drafts_cost_more_than_they_save() -> None:
    simulation = Simulation(0.45)
    assert simulation.run(1000, acceptance=0.4) >= 0.97
    assert simulation.drafted < 120


def test_draft_gate_adapts_to_a_change_of_the_acceptance_rate() -> None:
    simulation = Simulation(0.1)
    assert simulation.run(300, acceptance=0.8) > 1.2
    simulation.run(100, acceptance=0.0)
    assert simulation.run(600, acceptance=0.0) >= 0.97
    simulation.run(600, acceptance=0.8)
    assert simulation.run(300, acceptance=0.8) > 1.2


def test_noisy_step_times_do_not_close_the_draft_gate_if_the_gain_is_large() -> None:
    assert Simulation(0.1, noise=1.0).run(1000, acceptance=0.8) > 1.0


def test_drafts_for_four_sequences_cost_at_most_3_percent_if_rows_are_expensive() -> None:
    assert Simulation(0.1, sequences=4).run(400, acceptance=0.9) > 0.97


def test_ngram_drafts_become_shorter_if_rejected_and_rows_are_expensive() -> None:
    gate, acceptance = DraftGate(), Acceptance(decay=0.8)
    assert gate.ngram_drafts(acceptance, 10, rows=1, sequences=1)[0] == 10  # durations are not known yet
    for rows in (1, 2, 4, 6, 8, 16):
        gate.learn_step(rows, seconds(rows, 0.036))
    assert gate.ngram_drafts(acceptance, 5, rows=1, sequences=1)[0] == 5
    for _ in range(10):
        acceptance.learn(drafted=5, accepted=0)
    assert gate.ngram_drafts(acceptance, 5, rows=1, sequences=1)[0] == 1  # a second row is nearly free
    for _ in range(10):
        acceptance.learn(drafted=1, accepted=1)
    assert gate.ngram_drafts(acceptance, 5, rows=1, sequences=1)[0] == 5


def test_noisy_times_of_steps_with_two_rows_do_not_shorten_ngram_drafts() -> None:
    """A draft head tries single drafts: two rows are measured before the many rows of n-gram drafts."""
    gate, acceptance = DraftGate(0.03), Acceptance(0.9)
    for rows, duration in ((1, 1.0), (2, 1.15)):  # usually 1.06
        gate.learn_step(rows, duration)
    acceptance.learn(8, 8)
    assert gate.ngram_drafts(acceptance, 16, rows=1, sequences=1)[0] == 16


def test_one_slow_step_does_not_shorten_ngram_drafts() -> None:
    gate, acceptance = DraftGate(), Acceptance(0.9)
    acceptance.learn(8, 8)
    gate.learn_step(1, 0.036)
    gate.learn_step(17, 11 * 0.036)  # another program used the cores
    assert gate.ngram_drafts(acceptance, 16, rows=1, sequences=1)[0] == 16
    for _ in range(2):
        gate.learn_step(17, 6 * 0.036)
    assert gate.ngram_drafts(acceptance, 16, rows=1, sequences=1)[0] == 16


def test_ngram_drafts_return_after_slow_steps_on_a_busy_machine() -> None:
    """The gate avoids steps of 17 rows after slow ones, so it must forget their durations after some time."""
    gate, acceptance = DraftGate(), Acceptance(0.9)
    acceptance.learn(16, 8)
    gate.learn_step(1, 0.036)
    for _ in range(10):
        gate.learn_step(17, 11 * 0.036)
    assert gate.ngram_drafts(acceptance, 16, rows=1, sequences=1)[0] < 16
    for _ in range(600):
        gate.learn_step(1, 0.036)
    gate.learn_step(17, 2 * 0.036)
    assert gate.ngram_drafts(acceptance, 16, rows=1, sequences=1)[0] == 16


def test_ngram_drafts_stop_if_each_row_costs_as_much_as_a_step() -> None:
    gate, acceptance = DraftGate(), Acceptance(decay=0.8)
    for rows in (1, 2, 3, 4):
        gate.learn_step(rows, 0.036 * rows)
    for _ in range(10):
        acceptance.learn(drafted=1, accepted=0)
    drafts = [gate.ngram_drafts(acceptance, 1, rows=1, sequences=1)[0] for _ in range(30)]
    assert drafts[0] == 1  # on credit
    assert drafts[-1] == 0
