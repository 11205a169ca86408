"""Speculation: equal tokens in fewer steps for repetitive text, and no extra work for other text."""

import random
from collections.abc import Callable

import pytest
from simulated_cache import SimulatedCache

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams, TokenOutput
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool
from helexa.neuron.engine.scheduling import ngrams_and_counts
from helexa.neuron.engine.scheduling.ngrams_and_counts import Drafter
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence

TEXT = [7 * n % 101 for n in range(60)]  # no token twice
NextToken = Callable[[list[int]], int]


def test_draft_continues_the_text_after_the_last_matching_ngram() -> None:
    tokens = [*TEXT, 200, *TEXT[10:15]]
    drafter = Drafter(tokens)
    assert drafter.draft(2) == tuple(TEXT[15:17])
    assert drafter.draft(100) == tuple(TEXT[15:19])
    tokens.append(TEXT[15])
    assert drafter.draft(3) == tuple(TEXT[16:19]), "the drafter follows appended tokens"
    tokens.append(300)
    assert drafter.draft(3) == ()


def test_draft_follows_the_longest_match_or_the_latest_of_equal_length() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 50, 9, 4, 5, 6, 7, 8, 51, 9, 9, 1, 2, 3, 4, 5, 6, 7, 8]
    assert Drafter(tokens).draft(1) == (50,)
    assert Drafter(tokens[8:]).draft(1) == (51,)
    assert Drafter([4, 5, 6, 7, 8, 50, 4, 5, 6, 7, 8, 51, 4, 5, 6, 7, 8]).draft(1) == (51,)


def test_draft_longer_than_the_text_after_the_match_repeats_the_period() -> None:
    assert Drafter([9, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3]).draft(4) == (1, 2, 3, 1)


@pytest.mark.parametrize("length", range(12))
def test_text_without_a_match_of_enough_tokens_yields_no_draft(length: int) -> None:
    assert Drafter(TEXT[:length]).draft(5) == ()


def test_drafter_extended_token_by_token_drafts_like_a_newly_built_drafter() -> None:
    rng = random.Random(3)
    tokens: list[int] = []
    growing = Drafter(tokens)
    for _ in range(300):
        tokens += [rng.randrange(3) for _ in range(rng.randint(1, 4))]
        assert growing.draft(4) == Drafter(list(tokens)).draft(4)


def test_ngram_index_built_in_parts_drafts_like_one_built_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(4)
    for part in (1, 2, 5, 64):
        for length in range(40):
            tokens = [rng.randrange(3) for _ in range(length)]
            monkeypatch.setattr(ngrams_and_counts, "_MAX_OLDER", part)
            parted = Drafter(tokens)
            for _ in range(length // part + 1):
                tokens.append(rng.randrange(3))
                parted.draft(4)
            monkeypatch.setattr(ngrams_and_counts, "_MAX_OLDER", 1000)
            assert parted.draft(4) == Drafter(list(tokens)).draft(4)
            assert parted.may_draft == Drafter(list(tokens)).may_draft


def test_first_draft_of_a_long_prompt_reads_only_a_bounded_part_at_its_end() -> None:
    reads: list[int] = []

    class Reading(list[int]):
        def __getitem__(self, index: object) -> object:  # type: ignore[override]
            items = super().__getitem__(index)  # type: ignore[index]
            reads.append(len(items) if isinstance(items, list) else 1)
            return items

    late = [7, 8, 9, 4, 5, 6, 200]
    prompt = [*range(1000, 51000), *late, *range(300, 1000), *late[:6]]
    drafter = Drafter(Reading(prompt))
    assert drafter.draft(1) == (200,)
    assert sum(reads) < 3 * ngrams_and_counts._MAX_OLDER


def test_drafts_grow_after_acceptance_and_need_longer_matches_after_rejection() -> None:
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
    assert drafter.draft(100) == (), "after failures, a match of twenty tokens is too short"
    tokens += TEXT[20:40]
    draft = drafter.draft(100)
    assert draft == tuple(TEXT[40:42]), "a match of forty tokens is long enough"
    drafter.learn(2, 2)
    tokens += [300, *TEXT[10:13]]
    assert drafter.draft(100) == tuple(TEXT[13:17]), "one success lowers the required match length"


def copying(source: list[int]) -> NextToken:
    """Return a model that repeats `source` with every 17th token changed."""

    def next_token(tokens: list[int]) -> int:
        at = len(tokens) - len(source)
        return 500 + at if at % 17 == 16 else source[at % len(source)]

    return next_token


def inventing(tokens: list[int]) -> int:
    return random.Random(hash(tuple(tokens[-5:]))).randrange(1000)


def babbling(tokens: list[int]) -> int:
    return random.Random(hash(tuple(tokens))).randrange(3)


def run(
    next_token: NextToken, requests: list[Generate], pages: int = 200, page_size: int = 4, **options: object
) -> tuple[dict[int, list[int]], dict[int, str | None], int, int]:
    """Run all requests; return their tokens, their finish reasons, and the numbers of steps and of draft tokens."""
    scheduler = Scheduler(EngineOptions(**options), PagePool(pages, page_size))  # type: ignore[arg-type]
    cache = SimulatedCache(scheduler, next_token)
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
            assert hashed < len(entry.sequence.tokens), "only computed tokens may be hashed"
        assert steps < 10_000
    scheduler.check_idle()
    outputs_by_id: dict[int, list[int]] = {request.id: [] for request in requests}
    for output in outputs:
        outputs_by_id[output.id] += output.tokens
    return outputs_by_id, {output.id: output.finish for output in outputs}, steps, drafted


def request(number: int = 0, prompt: list[int] | None = None, max_tokens: int = 55, **fields: list[int]) -> Generate:
    return Generate(
        id=number, prompt=prompt or TEXT, max_tokens=max_tokens, sampling=SamplingParams(temperature=0), **fields
    )


@pytest.mark.parametrize("next_token", [copying(TEXT), inventing, babbling])
@pytest.mark.parametrize("pages", [200, 32])
def test_speculative_decoding_does_not_change_the_generated_tokens(next_token: NextToken, pages: int) -> None:
    requests = [request(number, TEXT, 50 + number) for number in range(3)]
    expected, ends, _, _ = run(next_token, requests, pages, speculation=False)
    tokens, finishes, _, drafted = run(next_token, requests, pages)
    assert (tokens, finishes) == (expected, ends)
    assert drafted or next_token is inventing


def test_repetitive_output_takes_at_most_half_as_many_steps_as_tokens() -> None:
    _, _, steps, _ = run(copying(TEXT), [request()])
    assert steps <= 55 // 2


def test_output_without_repetition_gets_few_drafts() -> None:
    _, _, steps, drafted = run(inventing, [request(max_tokens=500)])
    assert steps == 500
    assert drafted <= 8


@pytest.mark.parametrize("max_tokens", range(1, 15))
def test_drafts_do_not_exceed_max_tokens(max_tokens: int) -> None:
    tokens, ends, _, _ = run(copying(TEXT), [request(max_tokens=max_tokens)])
    assert (tokens[0], ends[0]) == (TEXT[:max_tokens], "length")


@pytest.mark.parametrize("stop", range(6, 16))
def test_stop_token_within_a_draft_ends_the_output(stop: int) -> None:
    tokens, ends, _, _ = run(copying(TEXT), [request(stop_ids=[TEXT[stop]])])
    assert (tokens[0], ends[0]) == (TEXT[: stop + 1], "stop")


@pytest.mark.parametrize("context", range(64, 76))
def test_output_with_drafts_ends_exactly_at_the_context_limit(context: int) -> None:
    tokens, ends, _, _ = run(copying(TEXT), [request()], context_length=context)
    assert (tokens[0], ends[0]) == (TEXT[: context - 60], "length")
    tokens, ends, _, _ = run(copying(TEXT), [request()], pages=context, page_size=1)
    assert (tokens[0], ends[0]) == (TEXT[: context - 60], "length")


def test_batch_of_more_than_speculation_max_sequences_gets_no_drafts() -> None:
    requests = [request(number) for number in range(5)]
    assert run(copying(TEXT), requests)[3] == 0
    assert run(copying(TEXT), requests, speculation_max_sequences=5)[3] > 0


def test_drafts_stay_within_max_step_tokens() -> None:
    tokens, _, _, drafted = run(copying(TEXT), [request(0), request(1)], max_step_tokens=5)
    assert drafted > 0
    assert tokens[0] == tokens[1]


def test_drafts_never_cause_the_preemption_of_a_sequence() -> None:
    scheduler = Scheduler(EngineOptions(), PagePool(34, 4))
    cache = SimulatedCache(scheduler, copying(TEXT))
    for number in range(2):
        scheduler.add(Sequence(request(number, [*TEXT[:-1], 300 + number], max_tokens=9)))
    while not scheduler.idle:
        plan = scheduler.plan()
        assert not scheduler.waiting
        scheduler.commit(plan, cache.run(plan))
