"""Prefix reuse on a simulated KV cache: shared pages, salts, and saved computation."""

import random
from typing import Any

import pytest
from simulated_cache import SimulatedCache

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, PrefixMiss, SamplingParams, TokenOutput
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool
from helexa.neuron.engine.scheduling import cache_miss
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.text.model_text import ModelText
from neuron.scripted_engine import END, TOKENIZER

PAGE = 4
PROMPT = list(range(50, 50 + 3 * PAGE))  # three full pages

# A ChatML template that removes reasoning from the history, as Qwen3's template does.
STRIPS_REASONING = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Simulation:
    """A scheduler with a simulated cache."""

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
        assert self.steps < 10_000, "the requests do not end"
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
        """Run a request to its end; return its cached prompt tokens."""
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
def test_prompt_reuses_the_full_pages_of_its_prefix(prompt: list[int], cached: int) -> None:
    simulation = Simulation()
    assert simulation.cached(PROMPT) == 0
    computed = simulation.computed
    assert simulation.cached(prompt, max_tokens=1) == cached
    assert simulation.computed - computed == len(prompt) - cached
    assert (simulation.scheduler.queues.prompt_tokens, simulation.scheduler.queues.cached_tokens) == (
        len(PROMPT) + len(prompt),
        cached,
    )


def test_pages_of_generated_tokens_are_reused_by_the_next_prompt() -> None:
    simulation = Simulation()
    first = simulation.add(PROMPT, max_tokens=2 * PAGE + 1)
    simulation.finish()
    assert simulation.cached([*first.tokens, 1]) == 5 * PAGE, "the last token is sampled but never computed"


def test_running_sequence_shares_its_computed_pages_with_an_equal_prompt() -> None:
    simulation = Simulation()
    simulation.add(PROMPT, max_tokens=40)
    simulation.step()
    free = simulation.scheduler.pages.free
    second = simulation.add([*PROMPT, 1], max_tokens=40)
    simulation.step()
    assert second.cached == 12
    assert simulation.scheduler.pages.free == free - 2, "one page for each sequence"
    simulation.scheduler.cancel(0)
    simulation.finish()


def test_partly_computed_prompt_shares_its_computed_pages_with_an_equal_prompt() -> None:
    simulation = Simulation(max_step_tokens=6, max_sequences=2)
    simulation.add(PROMPT)
    simulation.step()
    second = simulation.add([*PROMPT, 1])
    simulation.finish()
    assert second.cached in (PAGE, 2 * PAGE, 3 * PAGE)


def test_prompts_with_different_salts_share_no_pages() -> None:
    simulation = Simulation()
    prompt = [*PROMPT, 1]
    assert [simulation.cached(prompt, salt=salt) for salt in ("", "a", "b", "a", "", "b", "c")] == [
        0,
        0,
        0,
        12,
        12,
        12,
        0,
    ]


def test_option_prefix_reuse_all_ignores_salts_and_off_disables_reuse() -> None:
    prompt = [*PROMPT, 1]
    shared = Scheduler(EngineOptions(prefix_reuse="all"), PagePool(50, PAGE))
    unshared = Scheduler(EngineOptions(prefix_reuse="off"), PagePool(50, PAGE))
    for scheduler, expected in ((shared, 12), (unshared, 0)):
        for number, salt in enumerate("ab"):
            request = Generate(id=number, prompt=prompt, max_tokens=1, sampling=SamplingParams(), salt=salt)
            scheduler.add(Sequence(request))
            scheduler.commit(scheduler.plan(), [9])
        assert scheduler.queues.cached_tokens == expected


def test_pages_shared_with_a_running_sequence_need_no_memory_at_admission() -> None:
    simulation = Simulation(pages=6)
    simulation.add(PROMPT, max_tokens=3)  # three pages now, four later
    simulation.step()
    unrelated = simulation.add([9, *PROMPT])
    simulation.step()
    assert unrelated.started is None, "four pages are needed, two are free"
    simulation.scheduler.cancel(unrelated.id)
    simulation.add([*PROMPT, 1, 2])
    simulation.step()
    assert simulation.sequences[-1].started is not None, "one page is needed in addition to three shared pages"
    simulation.finish()


def test_cached_pages_that_a_prompt_reuses_are_not_counted_as_free_at_its_admission() -> None:
    simulation = Simulation(pages=6)
    simulation.cached(PROMPT)
    simulation.add([7] * PAGE, max_tokens=3)
    simulation.step()
    simulation.step()  # holds two pages; of the four free pages, three cache the prompt
    late = simulation.add([*PROMPT, *range(PAGE + 1)])
    simulation.step()
    assert late.started is None, "five pages are needed, four are free"
    simulation.finish()
    assert late.cached == 12


def test_preempted_sequence_reuses_its_cached_pages_when_it_resumes() -> None:
    simulation = Simulation(pages=6)
    old = simulation.add(list(range(7)), max_tokens=9)
    new = simulation.add(list(range(20, 27)), max_tokens=9)
    simulation.step()
    while new in simulation.scheduler.running:
        simulation.step()
    pending, computed = len(new.tokens), 0
    while new in simulation.scheduler.waiting:
        computed = simulation.computed
        simulation.step()
    assert old not in simulation.scheduler.running
    assert simulation.computed - computed == pending - 2 * PAGE
    simulation.finish()
    assert new.cached == 0, "pages of the sequence's own earlier run are not reported as cached"


def test_eviction_takes_the_pages_at_the_end_of_a_prefix_first() -> None:
    simulation = Simulation(pages=8)
    simulation.cached([*PROMPT, 1])
    simulation.cached([*PROMPT, 2])
    simulation.cached([8] * 5 * PAGE)  # takes six pages: two of the prompt's three cached pages remain
    assert simulation.cached([*PROMPT, 1]) == 8


def test_second_turn_reuses_the_pages_before_the_reasoning_that_the_template_strips() -> None:
    text = ModelText(TOKENIZER, STRIPS_REASONING, {})
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful assistant. " * 5},
        {"role": "user", "content": "What is six times seven?"},
    ]
    simulation = Simulation(pages=400)
    first = text.prompt_ids(turns)
    reply = "<think>Six sevens. Let me count them one by one.</think>\n\nForty-two."
    reply_tokens = iter([*TOKENIZER.encode(reply), END])
    simulation.cache.next_token = lambda tokens: next(reply_tokens)
    assert simulation.cached(first, max_tokens=500) == 0

    turns += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And eight?"}]
    second = text.prompt_ids(turns)
    previous = first + TOKENIZER.encode(reply)
    common = next(i for i, (old, new) in enumerate(zip(previous, second, strict=False)) if old != new)
    assert "<think>" not in TOKENIZER.decode(second)
    assert common >= len(first), "the second prompt keeps the first prompt as a prefix"
    simulation.cache.next_token = lambda tokens: END
    assert simulation.cached(second) == common // PAGE * PAGE


def test_ten_turns_of_an_agent_conversation_compute_each_token_about_once() -> None:
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
def test_sequences_of_random_traffic_read_correct_cached_pages_and_leak_none(seed: int) -> None:
    rng = random.Random(seed)
    options: dict[str, int] = {"max_step_tokens": rng.randint(1, 24), "max_sequences": rng.randint(1, 6)}
    options |= {"max_waiting": 1000, "speculation": seed % 2 == 0}
    simulation = Simulation(pages=rng.randint(8, 30), **options)
    simulation.cache.next_token = lambda tokens: rng.randrange(3)
    scheduler, families = simulation.scheduler, [[rng.randrange(3) for _ in range(24)] for _ in range(3)]
    finished: set[int] = set()
    for _ in range(2000):
        if len(simulation.sequences) < 60 and rng.random() < 0.3:
            prompt = rng.choice(families)[: rng.randint(1, 24)] + [rng.randrange(3) for _ in range(rng.randint(0, 4))]
            simulation.add(prompt, rng.randint(1, 8), rng.choice(["", "", "a"]))
        if rng.random() < 0.05 and simulation.sequences:
            victim = rng.choice(simulation.sequences)
            if scheduler.cancel(victim.id):
                finished.add(victim.id)
        finished |= {output.id for output in simulation.step() if output.finish}
        held = {page for sequence in scheduler.running for page in sequence.pages}
        assert len(held) + scheduler.pages.free == scheduler.pages.total
    assert scheduler.idle
    assert finished == set(range(60))
    assert scheduler.queues.cached_tokens > 0


LONG = [50 + number % 1000 for number in range(1600)]
CHANGED = [*LONG[:701], 7, *LONG[702:]]


@pytest.mark.parametrize(
    ("prompt", "salt", "expected"),
    [
        (CHANGED, "a", PrefixMiss(position=701, reason="changed")),
        ([*LONG, *LONG], "a", None),  # continues the conversation
        ([*LONG[:1400], 7, *LONG[1400:]], "a", None),  # few tokens are computed again
        ([7, *LONG], "a", None),  # has no beginning in common
        (CHANGED, "b", None),  # other principals learn nothing
    ],
)
def test_prefix_cache_miss_of_a_long_prompt_reports_the_first_changed_position(
    prompt: list[int], salt: str, expected: PrefixMiss | None
) -> None:
    simulation = Simulation(page_size=16, pages=1000)
    simulation.cached(LONG, salt="a")
    simulation.cached(LONG[:600], salt="a")
    simulation.add(prompt, salt=salt)
    assert [output.miss for output in simulation.finish()] == [expected, None]


def test_prefix_cache_miss_after_an_eviction_reports_the_first_evicted_page() -> None:
    simulation = Simulation(page_size=16, pages=150)
    simulation.cached(LONG, salt="a")
    simulation.cached(LONG, salt="b")
    sequence = simulation.add(LONG, salt="a")
    assert simulation.finish()[0].miss == PrefixMiss(position=sequence.cached, reason="evicted")


def test_prompts_kept_to_explain_cache_misses_are_few_and_one_per_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_miss, "_MOST_TOKENS", 4000)
    simulation = Simulation(page_size=16, pages=1000)
    for turn in range(700, 1600, 100):
        simulation.cached(LONG[:turn], salt="a")
    simulation.cached([1, *LONG], salt="a")  # with 1500 tokens of the conversation
    simulation.add(CHANGED, salt="a")
    assert simulation.finish()[0].miss == PrefixMiss(position=701, reason="changed")
    for first in (2, 3):
        simulation.cached([first, *LONG], salt="a")
    simulation.add([*LONG[:640], 8, *LONG], salt="a")
    assert simulation.finish()[0].miss is None  # both prompts that begin like this one were forgotten
