"""Speculation: the same tokens in fewer steps, and no more work where nothing repeats."""

import random
from collections.abc import Callable

import pytest
from simulation import SimulatedCache

from helexa.neuron.engine.ipc.messages import EngineOptions, Generate, SamplingParams, TokenOutput
from helexa.neuron.engine.kv_cache.page_pool import PagePool
from helexa.neuron.engine.scheduling.ngram import Drafter
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence

TEXT = [7 * n % 101 for n in range(60)]  # no token twice
Speaker = Callable[[list[int]], int]


def test_what_followed_the_last_time_is_guessed() -> None:
    tokens = [*TEXT, 200, *TEXT[10:15]]
    drafter = Drafter(tokens)
    assert drafter.draft(2) == tuple(TEXT[15:17])
    assert drafter.draft(100) == tuple(TEXT[15:19])
    tokens.append(TEXT[15])
    assert drafter.draft(3) == tuple(TEXT[16:19]), "it follows the tokens as they grow"
    tokens.append(300)
    assert drafter.draft(3) == ()


def test_the_longest_match_counts_then_the_last_one() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 50, 9, 4, 5, 6, 7, 8, 51, 9, 9, 1, 2, 3, 4, 5, 6, 7, 8]
    assert Drafter(tokens).draft(1) == (50,)
    assert Drafter(tokens[8:]).draft(1) == (51,)
    assert Drafter([4, 5, 6, 7, 8, 50, 4, 5, 6, 7, 8, 51, 4, 5, 6, 7, 8]).draft(1) == (51,)


def test_a_draft_beyond_the_end_repeats_itself() -> None:
    assert Drafter([9, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3]).draft(4) == (1, 2, 3, 1)


@pytest.mark.parametrize("length", range(12))
def test_short_texts_are_no_trouble(length: int) -> None:
    assert Drafter(TEXT[:length]).draft(5) == ()


def test_an_index_that_grew_is_the_one_made_at_once() -> None:
    rng = random.Random(3)
    tokens: list[int] = []
    growing = Drafter(tokens)
    for _ in range(300):
        tokens += [rng.randrange(3) for _ in range(rng.randint(1, 4))]
        assert growing.draft(4) == Drafter(list(tokens)).draft(4)


def test_depth_grows_with_success_and_what_fails_must_match_longer() -> None:
    tokens = [*TEXT, *TEXT[:20]]
    drafter = Drafter(tokens)
    for expected in (4, 8, 10, 10):
        draft = drafter.draft(100)
        assert len(draft) == expected
        drafter.learn(len(draft), len(draft))
    drafter.learn(10, 2)
    assert len(drafter.draft(100)) == 3
    for _ in range(9):
        drafter.learn(3, 0)
    assert drafter.draft(100) == (), "twenty tokens in common are not enough any more"
    tokens += TEXT[20:40]
    draft = drafter.draft(100)
    assert draft == tuple(TEXT[40:42]), "but forty are"
    drafter.learn(2, 2)
    tokens += [300, *TEXT[10:13]]
    assert drafter.draft(100) == tuple(TEXT[13:17]), "and one success makes it bold again"


def copying(source: list[int]) -> Speaker:
    """Repeats the prompt, with every 17th token changed."""

    def speak(tokens: list[int]) -> int:
        at = len(tokens) - len(source)
        return 500 + at if at % 17 == 16 else source[at % len(source)]

    return speak


def inventing(tokens: list[int]) -> int:
    return random.Random(hash(tuple(tokens[-5:]))).randrange(1000)


def babbling(tokens: list[int]) -> int:
    return random.Random(hash(tuple(tokens))).randrange(3)


def run(
    speak: Speaker, requests: list[Generate], pages: int = 200, page_size: int = 4, **options: object
) -> tuple[dict[int, list[int]], dict[int, str | None], int, int]:
    """The tokens and the ends of all requests, and how many steps and draft tokens they took."""
    scheduler = Scheduler(EngineOptions(**options), PagePool(pages, page_size))  # type: ignore[arg-type]
    cache = SimulatedCache(scheduler, speak)
    for request in requests:
        assert scheduler.add(Sequence(request)) is None
    outputs: list[TokenOutput] = []
    steps = drafted = 0
    while not scheduler.idle:
        plan = scheduler.plan()
        steps += 1
        drafted += sum(len(entry.drafts) for entry in plan)
        assert sum(entry.count + len(entry.drafts) for entry in plan) <= scheduler.options.max_step_tokens
        for entry in plan:
            sequence, ahead = entry.sequence, len(entry.drafts)
            assert sequence.generated + ahead < sequence.request.max_tokens
            assert len(sequence.tokens) + ahead < (scheduler.options.context_length or pages * page_size)
        outputs += scheduler.commit(plan, cache.run(plan))
        for entry in plan:
            hashed = (len(entry.sequence.chain) - 1) * page_size
            assert hashed < len(entry.sequence.tokens), "only what was computed and said has a hash"
        assert steps < 10_000
    scheduler.check_idle()
    said: dict[int, list[int]] = {request.id: [] for request in requests}
    for output in outputs:
        said[output.id] += output.tokens
    return said, {output.id: output.finish for output in outputs}, steps, drafted


def request(number: int = 0, prompt: list[int] | None = None, max_tokens: int = 55, **fields: list[int]) -> Generate:
    return Generate(
        id=number, prompt=prompt or TEXT, max_tokens=max_tokens, sampling=SamplingParams(temperature=0), **fields
    )


@pytest.mark.parametrize("speak", [copying(TEXT), inventing, babbling])
@pytest.mark.parametrize("pages", [200, 32])
def test_tokens_are_those_of_one_at_a_time(speak: Speaker, pages: int) -> None:
    requests = [request(number, TEXT, 50 + number) for number in range(3)]
    expected, ends, _, _ = run(speak, requests, pages, speculation=False)
    said, finishes, _, drafted = run(speak, requests, pages)
    assert (said, finishes) == (expected, ends)
    assert drafted or speak is inventing


def test_repetition_takes_a_fraction_of_the_steps() -> None:
    _, _, steps, _ = run(copying(TEXT), [request()])
    assert steps <= 55 // 2


def test_free_text_is_left_alone() -> None:
    _, _, steps, drafted = run(inventing, [request(max_tokens=500)])
    assert steps == 500
    assert drafted <= 8


@pytest.mark.parametrize("max_tokens", range(1, 15))
def test_the_limit_of_an_answer_is_exact(max_tokens: int) -> None:
    said, ends, _, _ = run(copying(TEXT), [request(max_tokens=max_tokens)])
    assert (said[0], ends[0]) == (TEXT[:max_tokens], "length")


@pytest.mark.parametrize("stop", range(6, 16))
def test_a_stop_token_ends_an_answer_within_a_draft(stop: int) -> None:
    said, ends, _, _ = run(copying(TEXT), [request(stop_ids=[TEXT[stop]])])
    assert (said[0], ends[0]) == (TEXT[: stop + 1], "stop")


@pytest.mark.parametrize("context", range(64, 76))
def test_the_context_is_filled_to_its_end(context: int) -> None:
    said, ends, _, _ = run(copying(TEXT), [request()], context_length=context)
    assert (said[0], ends[0]) == (TEXT[: context - 60], "length")
    said, ends, _, _ = run(copying(TEXT), [request()], pages=context, page_size=1)
    assert (said[0], ends[0]) == (TEXT[: context - 60], "length")


def test_many_sequences_are_not_guessed_for() -> None:
    requests = [request(number) for number in range(5)]
    assert run(copying(TEXT), requests)[3] == 0
    assert run(copying(TEXT), requests, speculation_max_sequences=5)[3] > 0


def test_a_small_budget_bounds_drafts() -> None:
    said, _, _, drafted = run(copying(TEXT), [request(0), request(1)], max_step_tokens=5)
    assert drafted > 0
    assert said[0] == said[1]


def test_drafts_preempt_nobody() -> None:
    scheduler = Scheduler(EngineOptions(), PagePool(34, 4))
    cache = SimulatedCache(scheduler, copying(TEXT))
    for number in range(2):
        scheduler.add(Sequence(request(number, [*TEXT[:-1], 300 + number], max_tokens=9)))
    while not scheduler.idle:
        plan = scheduler.plan()
        assert not scheduler.waiting
        scheduler.commit(plan, cache.run(plan))
