"""Prefix reuse, on a cache that remembers what was written where: what is shared, with whom, and what it saves."""

import random
from typing import Any

import pytest
from simulation import SimulatedCache

from helexa.neuron.engine.ipc.messages import EngineOptions, Generate, SamplingParams, TokenOutput
from helexa.neuron.engine.kv_cache.page_pool import PagePool
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.text.model_text import ModelText
from neuron.scripted_engine import END, TOKENIZER

PAGE = 4
PROMPT = list(range(50, 50 + 3 * PAGE))  # three full pages

# ChatML whose history has no thoughts: what Qwen3's template does.
THOUGHTLESS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Bench:
    """A scheduler over a simulated cache."""

    def __init__(self, pages: int = 100, page_size: int = PAGE, **options: object) -> None:
        options = {"speculation": False} | options
        self.scheduler = Scheduler(EngineOptions(**options), PagePool(pages, page_size))  # type: ignore[arg-type]
        self.cache = SimulatedCache(self.scheduler)
        self.computed = self.steps = 0
        self.sequences: list[Sequence] = []

    def add(self, prompt: list[int], max_tokens: int = 2, salt: str = "") -> Sequence:
        sampling = SamplingParams(temperature=0)
        request = Generate(
            id=len(self.sequences), prompt=prompt, max_tokens=max_tokens, sampling=sampling, stop_ids=[END], salt=salt
        )
        self.sequences.append(Sequence(request))
        assert self.scheduler.add(self.sequences[-1]) is None
        return self.sequences[-1]

    def step(self) -> list[TokenOutput]:
        plan = self.scheduler.plan()
        self.steps += 1
        assert self.steps < 10_000, "this never ends"
        self.computed += sum(entry.count for entry in plan)
        outputs = self.scheduler.commit(plan, self.cache.run(plan))
        self.scheduler.check_idle()
        return outputs

    def finish(self) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        while not self.scheduler.idle:
            outputs += self.step()
        return outputs

    def cached(self, prompt: list[int], max_tokens: int = 2, salt: str = "") -> int:
        """Run a prompt to its end; how much of it was found."""
        sequence = self.add(prompt, max_tokens, salt)
        outputs = self.finish()
        assert [output.cached_tokens for output in outputs] == [sequence.cached] + [0] * (len(outputs) - 1)
        return sequence.cached


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [
        ([*PROMPT, 1], 12),
        (PROMPT, 8),  # the last token's logits are needed, so its page is computed
        (PROMPT[:-1], 8),
        (PROMPT[: PAGE + 1], 4),
        (PROMPT[:PAGE], 0),
        ([*PROMPT[:6], 1, *PROMPT[7:], 1], 4),
        ([1, *PROMPT], 0),
    ],
)
def test_a_prompt_finds_the_full_pages_it_begins_with(prompt: list[int], cached: int) -> None:
    bench = Bench()
    assert bench.cached(PROMPT) == 0
    before = bench.computed
    assert bench.cached(prompt, max_tokens=1) == cached
    assert bench.computed - before == len(prompt) - cached
    assert (bench.scheduler.queues.prompt_tokens, bench.scheduler.queues.cached_tokens) == (
        len(PROMPT) + len(prompt),
        cached,
    )


def test_what_was_generated_is_found_as_well() -> None:
    bench = Bench()
    first = bench.add(PROMPT, max_tokens=2 * PAGE + 1)
    bench.finish()
    assert bench.cached([*first.tokens, 1]) == 5 * PAGE, "the last token was never computed"


def test_a_sequence_that_still_runs_shares_what_it_has_computed() -> None:
    bench = Bench()
    bench.add(PROMPT, max_tokens=40)
    bench.step()
    free = bench.scheduler.pages.free
    second = bench.add([*PROMPT, 1], max_tokens=40)
    bench.step()
    assert second.cached == 12
    assert bench.scheduler.pages.free == free - 2, "one page of its own, and one more for the other's next tokens"
    bench.scheduler.cancel(0)
    bench.finish()


def test_a_prompt_that_is_computed_in_chunks_is_shared_as_far_as_it_is() -> None:
    bench = Bench(max_step_tokens=6, max_sequences=2)
    bench.add(PROMPT)
    bench.step()
    second = bench.add([*PROMPT, 1])
    bench.finish()
    assert second.cached in (PAGE, 2 * PAGE, 3 * PAGE)


def test_salts_separate() -> None:
    bench = Bench()
    prompt = [*PROMPT, 1]
    assert [bench.cached(prompt, salt=salt) for salt in ("", "a", "b", "a", "", "b", "c")] == [0, 0, 0, 12, 12, 12, 0]


def test_reuse_can_ignore_salts_or_be_off() -> None:
    prompt = [*PROMPT, 1]
    everybody = Scheduler(EngineOptions(prefix_reuse="all"), PagePool(50, PAGE))
    nobody = Scheduler(EngineOptions(prefix_reuse="off"), PagePool(50, PAGE))
    for scheduler, expected in ((everybody, 12), (nobody, 0)):
        for number, salt in enumerate("ab"):
            request = Generate(id=number, prompt=prompt, max_tokens=1, sampling=SamplingParams(), salt=salt)
            scheduler.add(Sequence(request))
            scheduler.commit(scheduler.plan(), [9])
        assert scheduler.queues.cached_tokens == expected


def test_admission_counts_only_pages_that_nobody_else_holds() -> None:
    bench = Bench(pages=6)
    bench.add(PROMPT, max_tokens=3)  # three pages, soon four
    bench.step()
    stranger = bench.add([9, *PROMPT])
    bench.step()
    assert stranger.started is None, "four pages are needed, two are free"
    bench.scheduler.cancel(stranger.id)
    bench.add([*PROMPT, 1, 2])
    bench.step()
    assert bench.sequences[-1].started is not None, "one page is needed beside the three that it shares"
    bench.finish()


def test_kept_pages_that_a_prompt_shares_are_not_counted_as_free_for_it() -> None:
    bench = Bench(pages=6)
    bench.cached(PROMPT)
    bench.add([7] * PAGE, max_tokens=3)
    bench.step()
    bench.step()  # holds two; four are free, three of which hold the prompt
    late = bench.add([*PROMPT, *range(PAGE + 1)])
    bench.step()
    assert late.started is None, "five pages are needed, four are free"
    bench.finish()
    assert late.cached == 12


def test_a_preempted_sequence_gets_its_pages_back() -> None:
    bench = Bench(pages=6)
    old = bench.add(list(range(7)), max_tokens=9)
    new = bench.add(list(range(20, 27)), max_tokens=9)
    bench.step()
    while new in bench.scheduler.running:
        bench.step()
    pending, before = len(new.tokens), 0
    while new in bench.scheduler.waiting:
        before = bench.computed
        bench.step()
    assert old not in bench.scheduler.running
    assert bench.computed - before == pending - 2 * PAGE
    bench.finish()
    assert new.cached == 0, "what a sequence finds of its own is not reported as found"


def test_eviction_takes_tails_first_so_that_what_is_common_lives_longest() -> None:
    bench = Bench(pages=8)
    bench.cached([*PROMPT, 1])
    bench.cached([*PROMPT, 2])
    bench.cached([8] * 5 * PAGE)  # five pages and one more: two of the prompt's three survive
    assert bench.cached([*PROMPT, 1]) == 8


def test_a_second_turn_finds_everything_before_the_thoughts_that_its_template_strips() -> None:
    text = ModelText(TOKENIZER, THOUGHTLESS, {})
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful assistant. " * 5},
        {"role": "user", "content": "What is six times seven?"},
    ]
    bench = Bench(pages=400)
    first = text.prompt_ids(turns)
    said = "<think>Six sevens. Let me count them one by one.</think>\n\nForty-two."
    spoken = iter([*TOKENIZER.encode(said), END])
    bench.cache.next_token = lambda tokens: next(spoken)
    assert bench.cached(first, max_tokens=500) == 0

    turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "And eight?"}]
    second = text.prompt_ids(turns)
    before = first + TOKENIZER.encode(said)
    common = next(i for i, (old, new) in enumerate(zip(before, second, strict=False)) if old != new)
    assert "<think>" not in TOKENIZER.decode(second)
    assert common >= len(first), "the prompt itself is stable, up to where the assistant's turn begins"
    bench.cache.next_token = lambda tokens: END
    assert bench.cached(second) == common // PAGE * PAGE


def test_ten_turns_of_an_agent_compute_little_more_than_their_distinct_tokens() -> None:
    scheduler = Scheduler(EngineOptions(speculation=False), PagePool(400, 64))
    rng = random.Random(1)
    tokens = [rng.randrange(1000) for _ in range(6000)]
    computed = 0
    for number in range(10):
        sampling = SamplingParams(temperature=0)
        sequence = Sequence(Generate(id=number, prompt=tokens, max_tokens=100, sampling=sampling))
        scheduler.add(sequence)
        while not scheduler.idle:
            plan = scheduler.plan()
            computed += sum(entry.count for entry in plan)
            scheduler.commit(plan, [rng.randrange(1000) for entry in plan if entry.samples])
        tokens = sequence.tokens + [rng.randrange(1000) for _ in range(500)]
    assert computed < 1.15 * len(tokens)


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_with_common_prefixes_reads_what_it_wrote_and_never_leaks(seed: int) -> None:
    rng = random.Random(seed)
    options: dict[str, int] = {"max_step_tokens": rng.randint(1, 24), "max_sequences": rng.randint(1, 6)}
    options |= {"max_waiting": 1000, "speculation": seed % 2 == 0}
    bench = Bench(pages=rng.randint(8, 30), **options)
    bench.cache.next_token = lambda tokens: rng.randrange(3)
    scheduler, families = bench.scheduler, [[rng.randrange(3) for _ in range(24)] for _ in range(3)]
    finished: set[int] = set()
    for _ in range(2000):
        if len(bench.sequences) < 60 and rng.random() < 0.3:
            prompt = rng.choice(families)[: rng.randint(1, 24)] + [rng.randrange(3) for _ in range(rng.randint(0, 4))]
            bench.add(prompt, rng.randint(1, 8), rng.choice(["", "", "a"]))
        if rng.random() < 0.05 and bench.sequences:
            victim = rng.choice(bench.sequences)
            if scheduler.cancel(victim.id):
                finished.add(victim.id)
        finished |= {output.id for output in bench.step() if output.finish}
        held = {page for sequence in scheduler.running for page in sequence.pages}
        assert len(held) + scheduler.pages.free == scheduler.pages.total
    assert scheduler.idle
    assert finished == set(range(60))
    assert scheduler.queues.cached_tokens > 0
