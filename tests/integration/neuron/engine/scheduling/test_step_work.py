"""The work of the scheduler per step depends neither on the lengths of sequences, nor on the square of their number."""

from collections.abc import Callable
from hashlib import blake2b

import pytest

from helexa.neuron.engine import kv_cache_and_prefix_hashes
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool
from helexa.neuron.engine.scheduling.page_allocation_and_prefix_hits import Memory
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence

PAGE = 16
LONG_PROMPT = 1 << 16


class CountingPool(PagePool):
    """A page pool that counts how many pages its methods look up."""

    lookups = 0

    def match(self, chain: list[bytes]) -> list[int]:
        self.lookups += len(chain)
        return super().match(chain)

    def holds(self, page_hash: bytes) -> bool:
        self.lookups += 1
        return super().holds(page_hash)

    def is_held(self, page_hash: bytes) -> bool:
        self.lookups += 1
        return super().is_held(page_hash)

    def count_held(self, pages: list[int]) -> int:
        self.lookups += len(pages)
        return super().count_held(pages)


class ComparedSequence(Sequence):
    """A sequence that counts how often sequences are compared."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        ComparedSequence.comparisons += 1
        return self is other

    __hash__ = Sequence.__hash__


def scheduler_with(pages: int, states: StatePool | None = None, **options: object) -> Scheduler:
    defaults = {"speculation": False, "max_step_tokens": 64, "max_prefill_beside_decode": 0}
    return Scheduler(EngineOptions(**(defaults | options)), CountingPool(pages, PAGE), states)  # type: ignore[arg-type]


def add(scheduler: Scheduler, number: int, prompt: list[int], kind: type[Sequence] = Sequence) -> Sequence:
    sampling = SamplingParams(temperature=0)
    sequence = kind(Generate(id=number, prompt=prompt, max_tokens=1 << 20, sampling=sampling))
    assert scheduler.add(sequence) is None
    return sequence


def step(scheduler: Scheduler) -> list[int]:
    """Run a step whose sampled tokens are all 0, and return the ids of the sequences in its plan."""
    plan = scheduler.plan()
    scheduler.commit(plan, [0 for entry in plan if entry.samples])
    return [entry.sequence.id for entry in plan]


def prompt_of(number: int, length: int) -> list[int]:
    return [number + 1] * length


def uncached(scheduler: Scheduler, length: int) -> None:
    """Let eight new prompts wait behind a long prompt."""
    add(scheduler, 99, prompt_of(99, LONG_PROMPT))
    step(scheduler)
    for number in range(8):
        add(scheduler, number, prompt_of(number, length))


def cached(scheduler: Scheduler, length: int) -> None:
    """Let eight prompts with a cached beginning wait behind a long prompt."""
    first = add(scheduler, 98, prompt_of(98, length))
    while not first.generated:
        step(scheduler)
    scheduler.cancel(98)
    add(scheduler, 99, prompt_of(99, LONG_PROMPT))
    step(scheduler)
    for number in range(8):
        add(scheduler, number, prompt_of(98, length) + prompt_of(number, 4096))


def without_room(scheduler: Scheduler, length: int) -> None:
    """Let prompts with a cached beginning wait for pages that running sequences hold."""
    cached(scheduler, length)
    for _ in range(20):
        step(scheduler)
    scheduler.pages.take(scheduler.pages.free - LONG_PROMPT // PAGE - 100)


@pytest.mark.parametrize("prepare", [uncached, cached, without_room])
def test_number_of_looked_up_pages_is_independent_of_the_lengths_of_waiting_prompts(
    prepare: Callable[[Scheduler, int], None],
) -> None:
    lookups: dict[int, int] = {}
    for length in (256, 8192):
        scheduler = scheduler_with(60_000, max_sequences=4)
        prepare(scheduler, length)
        for _ in range(8):
            step(scheduler)
        assert len(scheduler.waiting) > 4
        assert isinstance(scheduler.pages, CountingPool)
        scheduler.pages.lookups = 0
        for _ in range(4):
            step(scheduler)
        lookups[length] = scheduler.pages.lookups
    assert lookups[8192] <= lookups[256] + 100, lookups


def test_step_hashes_few_pages_of_waiting_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = 0

    def counting(*args: bytes, digest_size: int) -> object:
        nonlocal hashes
        hashes += 1
        return blake2b(*args, digest_size=digest_size)

    scheduler = scheduler_with(100_000)
    uncached(scheduler, 8192)
    monkeypatch.setattr(kv_cache_and_prefix_hashes, "blake2b", counting)
    step(scheduler)
    assert hashes < 100


def test_cached_waiting_prompt_is_found_and_runs_before_uncached_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("helexa.neuron.engine.scheduling.page_allocation_and_prefix_hits._MAX_NEW_MATCHES", 16)
    scheduler = scheduler_with(100_000, max_sequences=64)
    prefix = prompt_of(98, 2048)
    first = add(scheduler, 98, prefix)
    while not first.generated:
        step(scheduler)
    add(scheduler, 99, prompt_of(99, LONG_PROMPT))
    step(scheduler)
    plain = [add(scheduler, number, prompt_of(number, 500)) for number in range(6)]
    nearly_cached = add(scheduler, 7, [*prefix, 5])
    for _ in range(40):
        step(scheduler)
        if nearly_cached.generated:
            break
    assert nearly_cached.cached == 2048
    assert not all(sequence.generated for sequence in plain)


def test_search_for_a_state_snapshot_reads_few_page_hashes_of_a_long_prompt() -> None:
    class CountingChain(list[bytes]):
        read = 0

        def __getitem__(self, index: object) -> object:  # type: ignore[override]
            items = super().__getitem__(index)  # type: ignore[index]
            self.read += len(items) if isinstance(items, list) else 1
            return items

    chain = CountingChain(str(number).encode() for number in range(10_000))
    states = StatePool(1, 3)
    for length in (5, 7, 9000):
        slot = states.reserve()
        assert slot is not None
        states.register(slot, str(length).encode(), length)
    assert [states.longest(chain, pages) for pages in (4, 5, 8, 8999, 9999)] == [0, 5, 7, 7, 9000]
    assert chain.read < 40


def test_sequence_comparisons_per_step_grow_linearly_with_the_batch_size() -> None:
    scheduler = scheduler_with(10_000, max_sequences=128, max_step_tokens=2048)
    sequences = [add(scheduler, number, prompt_of(number, 8), ComparedSequence) for number in range(128)]
    while not all(sequence.generated for sequence in sequences):
        step(scheduler)
    ComparedSequence.comparisons = 0
    assert len(step(scheduler)) == 128
    assert ComparedSequence.comparisons < 256


def test_start_of_many_sequences_sums_the_memory_of_running_ones_in_linear_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = Memory._needed
    calls = 0

    def counting(self: Memory, sequence: Sequence) -> int:
        nonlocal calls
        calls += 1
        return needed(self, sequence)

    scheduler = scheduler_with(10_000, max_sequences=128, max_step_tokens=2048)
    for number in range(128):
        add(scheduler, number, prompt_of(number, 8))
    monkeypatch.setattr(Memory, "_needed", counting)
    assert len(step(scheduler)) == 128
    assert calls < 128 * 5
