"""Recurrent states on a simulated cache that records each state's tokens: snapshots, reuse, preemption, drafts."""

import random

import pytest
from simulated_cache import SimulatedCache
from simulated_images import image, image_request

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, PrefixMiss, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool
from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence

PAGE = 4


class Simulation:
    """A scheduler with state slots and a simulated cache; tokens repeat with `period`."""

    def __init__(self, *, pages: int = 200, snapshots: int = 50, period: int = 1000, **options: object) -> None:
        options = {"speculation": False, "max_sequences": 8} | options
        engine_options = EngineOptions(**options)  # type: ignore[arg-type]
        self.states = StatePool(engine_options.max_sequences, snapshots)
        self.scheduler = Scheduler(engine_options, PagePool(pages, PAGE), self.states)
        self.cache = SimulatedCache(self.scheduler, lambda tokens: 500 + len(tokens) % period)
        self.plans: list[Plan] = []
        self.added = 0

    def add(self, prompt: list[int], max_tokens: int = 2, turn: int = 0, salt: str = "") -> Sequence:
        request = Generate(
            id=self.added,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0),
            turn=turn,
            salt=salt,
        )
        return self.add_request(request)

    def add_request(self, request: Generate) -> Sequence:
        self.added += 1
        sequence = Sequence(request)
        assert self.scheduler.add(sequence) is None
        return sequence

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.plans.append(plan)
        assert len(self.plans) < 20_000, "the requests do not end"
        self.scheduler.commit(plan, self.cache.run(plan))
        self.scheduler.check_idle()

    def finish(self) -> None:
        while not self.scheduler.idle:
            self.step()

    def run(self, prompt: list[int], max_tokens: int = 2, turn: int = 0, salt: str = "") -> Sequence:
        sequence = self.add(prompt, max_tokens, turn, salt)
        self.finish()
        return sequence


def token_range(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_next_turn_starts_from_the_state_snapshot_at_the_end_of_the_first_prompt() -> None:
    simulation = Simulation()
    first = simulation.run(token_range(30), max_tokens=2)
    assert first.cached == 0
    assert simulation.run([*first.tokens, *token_range(9, 900)]).cached == 7 * PAGE, "the last full page ends at 28"


def test_second_state_snapshot_is_saved_at_the_end_of_the_output() -> None:
    simulation = Simulation()
    first = simulation.run(token_range(30), max_tokens=21)
    assert simulation.states.snapshots == 2, "one after the prompt, one after the output"
    assert simulation.run([*first.tokens, 7, 8, 9]).cached == 48


def test_prompt_with_another_last_turn_starts_from_the_snapshot_before_that_turn() -> None:
    simulation = Simulation()
    simulation.run(token_range(40), turn=22)
    assert simulation.run([*token_range(22), *token_range(20, 700)]).cached == 20
    assert simulation.run(token_range(40), turn=22).cached == 36, "a repeated prompt starts from its end"


def test_long_prompt_saves_state_snapshots_every_2048_tokens() -> None:
    simulation = Simulation(pages=3000)
    simulation.run(token_range(5000))
    assert simulation.run([*token_range(4500), 9999]).cached == 4096
    assert simulation.run([*token_range(2100), 9999]).cached == 2048


def test_cached_pages_without_a_state_snapshot_are_computed_again() -> None:
    simulation = Simulation()
    simulation.run(token_range(30))
    assert simulation.run([*token_range(20), 777]).cached == 0


def test_prompts_with_different_salts_share_no_state_snapshots() -> None:
    simulation = Simulation()
    simulation.run(token_range(30), salt="a")
    assert simulation.run(token_range(30), salt="b").cached == 0
    assert simulation.run(token_range(30), salt="a").cached == 28


def test_least_recently_used_state_snapshot_is_evicted_first() -> None:
    simulation = Simulation(snapshots=2)
    for start in (0, 1000):
        simulation.run(token_range(30, start), max_tokens=1)
    simulation.run(token_range(30), max_tokens=1)
    simulation.run(token_range(30, 2000), max_tokens=1)
    assert simulation.run(token_range(30), max_tokens=1).cached == 28
    assert simulation.run(token_range(30, 1000), max_tokens=1).cached == 0


@pytest.mark.parametrize("others", [0, 20])
def test_snapshot_of_the_longest_prefix_is_found_among_few_and_among_many_snapshots(others: int) -> None:
    chain = [bytes([page]) for page in range(9)]
    states = StatePool(1, 2 + others)
    for page_hash, pages in [(chain[2], 2), (chain[5], 5), *((bytes([100 + n]), 1 + n % 8) for n in range(others))]:
        slot = states.reserve()
        assert slot is not None
        states.register(slot, page_hash, pages)
    assert [states.longest(chain, pages) for pages in (8, 5, 4, 2, 1, 0)] == [5, 5, 2, 2, 0, 0]


def test_repeated_prompt_is_computed_again_if_there_are_no_snapshot_slots() -> None:
    simulation = Simulation(snapshots=0)
    simulation.run(token_range(30))
    assert simulation.run(token_range(30)).cached == 0


def test_accepted_drafts_of_a_recurrent_model_are_recomputed_and_change_no_tokens() -> None:
    prompt = [500 + n % 5 for n in range(43)]
    plain = Simulation(period=5)
    expected = plain.run(prompt, max_tokens=40).tokens
    speculating = Simulation(period=5, speculation=True)
    assert speculating.run(prompt, max_tokens=40).tokens == expected
    assert len(speculating.plans) < len(plain.plans) / 2
    assert max(entry.count for plan in speculating.plans[1:] for entry in plan) > 1, (
        "accepted drafts were not recomputed"
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("speculation", [False, True])
def test_sequences_of_random_traffic_read_correct_recurrent_states_and_leak_none(seed: int, speculation: bool) -> None:
    """Few pages and snapshots, common prefixes, cancellations; the simulated cache checks each state."""
    rng = random.Random(seed)
    simulation = Simulation(
        pages=60, snapshots=5, period=6, speculation=speculation, max_step_tokens=24, max_sequences=4, max_waiting=99
    )
    stems = [token_range(rng.randint(10, 60), 1000 * n) for n in range(3)]
    running: list[Sequence] = []
    for _ in range(60):
        stem = rng.choice(stems)
        prompt = [*stem[: rng.randint(1, len(stem))], *(500 + n % 6 for n in range(rng.randint(0, 20)))]
        running.append(simulation.add(prompt, rng.randint(1, 40), turn=rng.randint(0, len(prompt))))
        for _ in range(rng.randint(0, 8)):
            simulation.step()
        if rng.random() < 0.2:
            simulation.scheduler.cancel(rng.choice(running).id)
    simulation.finish()
    assert simulation.scheduler.queues.cached_tokens > 0
    assert simulation.states.idle, "a state slot leaked"


def wait_for_image_budget(simulation: Simulation) -> Sequence:
    """Start a sequence from the snapshot of `token_range(8)`, in a step whose image tokens another sequence takes."""
    simulation.add_request(image_request(simulation.added, [image(0, 6)], max_tokens=1))
    sequence = simulation.add_request(image_request(simulation.added, [token_range(8), image(1, 6)]))
    simulation.step()
    assert sequence.computed == 8
    assert sequence not in [entry.sequence for entry in simulation.plans[-1]], "the step had tokens of the sequence"
    return sequence


def test_snapshot_that_a_prompt_waiting_for_image_budget_needs_is_not_evicted() -> None:
    simulation = Simulation(snapshots=1, max_step_tokens=8)
    simulation.run(token_range(10), max_tokens=1)
    sequence = wait_for_image_budget(simulation)
    simulation.finish()
    assert (sequence.cached, sequence.generated) == (8, 2)
    assert simulation.states.idle


def test_snapshot_needed_by_a_waiting_image_prompt_survives_a_newer_snapshot() -> None:
    """The sequence that took the snapshot in its output replaces the snapshot at the end of the next page."""
    simulation = Simulation(snapshots=3, max_step_tokens=9)
    first = simulation.add(token_range(3), max_tokens=15)
    while len(first.tokens) < 12:
        simulation.step()
    for number in range(2):
        simulation.add_request(image_request(simulation.added, [image(number, 6)], max_tokens=1))
    waiting = simulation.add_request(image_request(simulation.added, [first.tokens[:8], image(2, 6)]))
    for _ in range(2):  # the first sequence ends its third page, then the second image takes a snapshot
        simulation.step()
        assert waiting.computed == 8
        assert waiting not in [entry.sequence for entry in simulation.plans[-1]]
    simulation.finish()
    assert waiting.generated == 2
    assert simulation.states.idle


@pytest.mark.parametrize("end", ["cancel", "preempt", "fail_all"])
def test_snapshot_of_a_waiting_sequence_can_be_evicted_after_the_sequence_ends(end: str) -> None:
    simulation = Simulation(snapshots=1, max_step_tokens=8)
    simulation.run(token_range(10), max_tokens=1)
    sequence = wait_for_image_budget(simulation)
    if end == "cancel":
        simulation.scheduler.cancel(sequence.id)
    elif end == "preempt":
        simulation.scheduler.queues.preempt(sequence)
        simulation.scheduler.cancel(sequence.id)
    else:
        simulation.scheduler.fail_all("the device failed")
    simulation.finish()
    assert simulation.states.idle
    simulation.run(token_range(10, 300), max_tokens=1)
    assert simulation.run(token_range(10, 300), max_tokens=1).cached == 8, "the slot takes a new snapshot"


def test_cache_miss_of_a_recurrent_model_reports_changed_tokens_or_a_missing_snapshot() -> None:
    simulation = Simulation(pages=6000)
    prompt = token_range(6000)
    assert simulation.run(prompt).miss is None
    changed = simulation.run([*prompt[:5000], 9999, *prompt[5001:]])
    assert (changed.cached, changed.miss) == (4096, PrefixMiss(position=5000, reason="changed"))
    simulation.states.clear()
    assert simulation.run(prompt).miss == PrefixMiss(position=0, reason="no_state")
