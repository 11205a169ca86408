"""The scheduler without a model; sampled tokens are artificial."""

import random

import pytest
from simulated_images import image, image_request

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool
from helexa.neuron.engine.scheduling.prompt_images import ImageTraits
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence


def sequence(number: int, prompt: int, max_tokens: int = 4, stop_ids: list[int] | None = None) -> Sequence:
    """Return a sequence whose prompt shares no prefix with other sequences."""
    tokens = [100 + number] * prompt
    return Sequence(
        Generate(id=number, prompt=tokens, max_tokens=max_tokens, sampling=SamplingParams(), stop_ids=stop_ids or [])
    )


def options(**limits: int) -> EngineOptions:
    """Return options without speculation: one token per sequence and step."""
    return EngineOptions(speculation=False, **limits)  # type: ignore[arg-type]


def step(scheduler: Scheduler, token: int = 9) -> dict[int, str | None]:
    plan = scheduler.plan()
    assert plan or scheduler.idle, "the scheduler has requests but plans no step"
    outputs = scheduler.commit(plan, [token for entry in plan if entry.samples])
    return {output.id: output.finish for output in outputs}


def planned(scheduler: Scheduler) -> list[tuple[int, int]]:
    return [(entry.sequence.id, entry.count) for entry in scheduler.plan()]


def test_decode_rows_come_first_and_prompt_chunks_get_the_remaining_token_budget() -> None:
    scheduler = Scheduler(options(max_step_tokens=10), PagePool(100, 4))
    scheduler.add(sequence(1, 3))
    assert planned(scheduler) == [(1, 3)]
    scheduler.commit(scheduler.plan(), [9])
    scheduler.add(sequence(2, 25))
    assert planned(scheduler) == [(1, 1), (2, 9)]


def test_image_that_fills_a_step_delays_the_next_chunk_of_a_long_prompt() -> None:
    """The image must be computed in one step. The long prompt then waits for the next step."""
    scheduler = Scheduler(options(max_step_tokens=8), PagePool(100, 4), image_traits=ImageTraits(whole=True))
    scheduler.add(sequence(1, 30))
    scheduler.add(Sequence(image_request(2, [image(0, 9)])))
    assert planned(scheduler) == [(2, 9)]
    assert [step(scheduler), planned(scheduler)] == [{2: None}, [(2, 1), (1, 7)]]


def test_prompt_longer_than_the_token_budget_is_chunked_and_samples_one_token() -> None:
    scheduler = Scheduler(options(max_step_tokens=10), PagePool(100, 4))
    scheduler.add(sequence(1, 25, max_tokens=1))
    assert [step(scheduler), step(scheduler), step(scheduler)] == [{}, {}, {1: "length"}]
    scheduler.check_idle()


def test_chunked_prompt_reports_its_cached_tokens_only_once() -> None:
    scheduler = Scheduler(options(max_step_tokens=10), PagePool(100, 4))
    outputs: list[list[tuple[bool, int, int]]] = []
    for number in (1, 2):
        prompt = [7] * (20 if number == 1 else 45)
        request = Generate(id=number, prompt=prompt, max_tokens=1, sampling=SamplingParams(), reports_start=True)
        scheduler.add(Sequence(request))
        reported = []
        while not scheduler.idle:
            plan = scheduler.plan()
            reported += scheduler.commit(plan, [9 for entry in plan if entry.samples])
        outputs.append([(output.started, output.cached_tokens, len(output.tokens)) for output in reported])
    assert outputs == [[(True, 0, 0), (False, 0, 1)], [(True, 20, 0), (False, 0, 1)]]


def test_stop_token_ends_the_sequence_and_frees_its_kv_pages() -> None:
    pool = PagePool(10, 4)
    scheduler = Scheduler(options(), pool)
    scheduler.add(sequence(1, 6, max_tokens=50, stop_ids=[7]))
    assert step(scheduler) == {1: None}
    assert pool.free == 8
    assert step(scheduler, token=7) == {1: "stop"}
    assert pool.free == 10


def test_newest_sequence_is_preempted_if_pages_run_out_and_resumes_first() -> None:
    scheduler = Scheduler(options(), PagePool(5, 4))
    scheduler.add(sequence(1, 7, max_tokens=9))
    scheduler.add(sequence(2, 7, max_tokens=9))
    scheduler.add(sequence(3, 7, max_tokens=9))
    assert [s.id for s in scheduler.waiting] == [1, 2, 3]
    step(scheduler)
    assert [s.id for s in scheduler.running] == [1, 2]
    step(scheduler)  # both sequences have 8 tokens: two pages each, one page is free
    step(scheduler)  # position 8 of both sequences needs a third page, but only one page is free
    assert [s.id for s in scheduler.running] == [1]
    assert [s.id for s in scheduler.waiting] == [2, 3]
    assert scheduler.waiting[0].computed == 0


def test_cancel_of_a_sequence_frees_its_kv_pages() -> None:
    pool = PagePool(10, 4)
    scheduler = Scheduler(options(), pool)
    scheduler.add(sequence(1, 6))
    scheduler.add(sequence(2, 6))
    step(scheduler)
    assert scheduler.cancel(1)
    assert not scheduler.cancel(1)
    assert scheduler.cancel(2)
    assert scheduler.idle
    assert pool.free == 10


def test_rejected_request_gets_an_error_output_with_the_reason() -> None:
    scheduler = Scheduler(options(max_waiting=1), PagePool(2, 4))
    rejection = scheduler.add(sequence(1, 8))
    assert rejection is not None
    assert rejection.finish == "error"
    assert "needs more than the KV cache of 8 tokens" in str(rejection.error)
    assert scheduler.add(sequence(2, 3)) is None
    rejection = scheduler.add(sequence(3, 3))
    assert rejection is not None
    assert str(rejection.error).startswith("overloaded")


def test_sequence_ends_with_finish_reason_length_at_the_context_limit() -> None:
    scheduler = Scheduler(options(context_length=8), PagePool(10, 4))
    scheduler.add(sequence(1, 6, max_tokens=50))
    assert step(scheduler) == {1: None}
    assert step(scheduler) == {1: "length"}


def test_all_decoding_sequences_run_in_each_step_even_beyond_the_token_budget() -> None:
    scheduler = Scheduler(options(max_step_tokens=2, max_sequences=8), PagePool(100, 4))
    for number in range(5):
        scheduler.add(sequence(number, 1, max_tokens=50))
    while len(scheduler.running) < 5:
        step(scheduler)
    step(scheduler)
    for _ in range(10):
        assert step(scheduler) == dict.fromkeys(range(5))


def test_prompt_advances_although_decode_rows_exceed_the_token_budget() -> None:
    scheduler = Scheduler(options(max_step_tokens=2, max_sequences=8), PagePool(100, 4))
    for number in range(5):
        scheduler.add(sequence(number, 1, max_tokens=50))
    while any(s.pending > 1 for s in scheduler.running) or len(scheduler.running) < 5:
        step(scheduler)
    scheduler.add(sequence(9, 10))
    for _ in range(9):
        assert 9 not in step(scheduler)
    assert step(scheduler) == dict.fromkeys([0, 1, 2, 3, 4, 9])


def test_prompt_tokens_per_step_are_limited_only_while_other_sequences_decode() -> None:
    scheduler = Scheduler(options(max_step_tokens=100, max_prefill_beside_decode=8), PagePool(100, 4))
    scheduler.add(sequence(1, 60, max_tokens=4))
    assert planned(scheduler) == [(1, 60)]
    scheduler.commit(scheduler.plan(), [9])
    scheduler.add(sequence(2, 40))
    for _ in range(3):
        assert planned(scheduler) == [(1, 1), (2, 8)]
        step(scheduler)
    assert planned(scheduler) == [(2, 16)], "the other sequence has ended"


def test_option_max_prefill_beside_decode_0_does_not_limit_prompt_tokens() -> None:
    scheduler = Scheduler(options(max_step_tokens=100, max_prefill_beside_decode=0), PagePool(100, 4))
    scheduler.add(sequence(1, 5))
    step(scheduler)
    scheduler.add(sequence(2, 200))
    assert planned(scheduler) == [(1, 1), (2, 99)]


def test_short_prompt_does_not_wait_for_a_long_prompt() -> None:
    scheduler = Scheduler(options(max_step_tokens=16), PagePool(100, 4))
    scheduler.add(sequence(1, 200))
    assert planned(scheduler) == [(1, 16)]
    step(scheduler)
    scheduler.add(sequence(2, 5, max_tokens=1))
    scheduler.add(sequence(3, 2, max_tokens=1))
    assert sorted(planned(scheduler)) == [(1, 9), (2, 5), (3, 2)]
    assert step(scheduler) == {2: "length", 3: "length"}
    assert planned(scheduler) == [(1, 16)]


def test_at_most_two_prompts_are_chunked_at_once() -> None:
    scheduler = Scheduler(options(max_step_tokens=16), PagePool(1000, 4))
    for number in range(5):
        scheduler.add(sequence(number, 200, max_tokens=1))
    ended: list[int] = []
    while not scheduler.idle:
        assert len(scheduler.running) <= 2
        ended += step(scheduler)
    assert ended == [0, 1, 2, 3, 4]


def test_pages_that_a_started_prompt_still_needs_are_reserved() -> None:
    scheduler = Scheduler(options(max_step_tokens=8), PagePool(10, 4))
    scheduler.add(sequence(1, 30, max_tokens=1))  # needs eight pages, holds two
    step(scheduler)
    scheduler.add(sequence(2, 10))
    step(scheduler)
    assert [s.id for s in scheduler.running] == [1]
    while 2 not in step(scheduler):
        assert 1 not in [s.id for s in scheduler.waiting]


def test_older_prompt_is_not_preempted_for_a_newer_sequence() -> None:
    scheduler = Scheduler(options(max_step_tokens=8, max_prefill_beside_decode=1), PagePool(12, 4))
    scheduler.add(sequence(1, 30, max_tokens=9))
    step(scheduler)
    scheduler.add(sequence(2, 3, max_tokens=40))
    preempted: set[int] = set()
    while not scheduler.idle:
        step(scheduler)
        preempted |= {s.id for s in scheduler.waiting}
    assert preempted == {2}
    scheduler.check_idle()


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_finishes_and_leaks_no_pages(seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(rng.randint(6, 20), 4)
    limits = options(max_step_tokens=rng.randint(1, 24), max_sequences=rng.randint(1, 6), max_waiting=1000)
    scheduler = Scheduler(limits, pool)
    finished: set[int] = set()
    cancelled: set[int] = set()
    expected = 0
    for _ in range(3000):
        if expected < 40 and rng.random() < 0.3:
            if scheduler.add(sequence(expected, rng.randint(1, 20), rng.randint(1, 8))) is not None:
                finished.add(expected)
            expected += 1
        if rng.random() < 0.05:
            victim = rng.randrange(expected + 1)
            if scheduler.cancel(victim):
                cancelled.add(victim)
        decoding = {s for s in scheduler.running if s.pending == 1}
        plan = scheduler.plan()
        assert sum(entry.count for entry in plan) <= max(limits.max_step_tokens, limits.max_sequences)
        assert len(scheduler.running) <= limits.max_sequences
        # Sequences run in the order of arrival. A decoding sequence stays in the plan unless it was preempted.
        order = [s.id for s in scheduler.running]
        assert order == sorted(order)
        assert decoding <= {entry.sequence for entry in plan} | set(scheduler.waiting)
        assert not scheduler.running or scheduler.running[0] in {entry.sequence for entry in plan}
        held = [page for s in scheduler.running for page in s.pages]
        assert len(held) == len(set(held))
        assert len(held) + pool.free == pool.total
        outputs = scheduler.commit(plan, [9 for entry in plan if entry.samples])
        finished |= {output.id for output in outputs if output.finish}
        scheduler.check_idle()
    assert scheduler.idle
    assert finished | cancelled == set(range(40))


def scored(number: int, prompt: int, max_tokens: int = 0) -> Sequence:
    return Sequence(
        Generate(id=number, prompt=[5] * prompt, max_tokens=max_tokens, sampling=SamplingParams(), prompt_logprobs=0)
    )


def test_sequence_with_max_tokens_0_ends_after_its_prompt() -> None:
    pool = PagePool(100, 4)
    scheduler = Scheduler(options(max_step_tokens=10), pool)
    scheduler.add(sequence(1, 25, max_tokens=0))
    assert [step(scheduler), step(scheduler), step(scheduler)] == [{}, {}, {1: "length"}]
    assert pool.free == 100


def test_non_finite_prompt_scores_fail_only_their_sequence() -> None:
    scheduler = Scheduler(options(), PagePool(100, 4))
    scheduler.add(scored(1, 3))
    scheduler.add(scored(2, 3, max_tokens=1))
    scheduler.add(scored(3, 3, max_tokens=1))
    score = (-1.0, [])
    outputs = scheduler.commit(
        scheduler.plan(), [8, 9], scores={1: [score] * 2, 2: [score, (float("nan"), [])], 3: [score] * 2}
    )
    assert [(output.finish, output.tokens) for output in outputs] == [("length", []), ("error", []), ("length", [9])]
    assert scheduler.committer.take_pages_to_clear()
    scheduler.check_idle()


def test_prompt_whose_tokens_are_scored_does_not_use_cached_pages() -> None:
    scheduler = Scheduler(options(), PagePool(100, 4))
    for number in (1, 2):
        scheduler.add(scored(number, 20))
        assert planned(scheduler) == [(number, 20)]
        scheduler.commit(scheduler.plan(), [])
