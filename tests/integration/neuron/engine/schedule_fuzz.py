"""Random requests and random schedules on a real runner: each sequence must have the output that it has alone.

The schedules have common prefixes, cancels, drafts, preemption by few pages, few snapshots, small chunks and
overlapping steps. The requests have images, grammars, penalties, log-probabilities and seeds.

The native kernels compute equal logits in any batch, so all tokens and log-probabilities are equal. The logits of the
reference kernels differ by rounding. There, a token may differ if the log-probabilities of its position are the same
within `_ROUNDING`.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.grammar_matcher import GrammarMatcher
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, Logprob, PromptImage, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool
from helexa.neuron.engine.loop import Steps
from helexa.neuron.engine.scheduling.draft_length import Candidate, DraftGate, ModelDrafter
from helexa.neuron.engine.scheduling.prompt_images import TEXT_TRAITS
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.window_page_pool import WindowPages, window_pages_needed
from helexa.neuron.ops.kernel_header import MAX_DRAFTS, PAGE_SIZE
from helexa.neuron.vision.image_tokens_and_errors import expanded_tokens
from helexa.neuron.vision.processor_choice import PreparedImage

SEQUENCES = 8
_ROUNDING = 1e-4
LETTERS = 256  # tokens of the vocabulary that are text
_ALONE = EngineOptions(max_sequences=1, prefix_reuse="off", speculation=False)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "on": {"type": "boolean"}},
    "required": ["name", "on"],
    "additionalProperties": False,
}
_GRAMMARS = [
    LLMatcher.grammar_from_json_schema(_SCHEMA, {"whitespace_flexible": False}),
    LLMatcher.grammar_from_regex("[a-z]{3,20}"),
    LLMatcher.grammar_from_regex("(red|green|blue), as the sky is"),
]


@dataclass
class Subject:
    """A model under test.

    Attributes:
        runner: the loaded model, for at least `SEQUENCES` sequences.
        vocabulary: the vocabulary of grammars.
        images: images for prompts; empty for a model that reads text only.
        image_token: the token whose embeddings are replaced by those of an image.
        exact: whether a row of logits does not depend on the other rows of a batch.
    """

    runner: Runner
    vocabulary: LLTokenizer
    images: list[PreparedImage]
    image_token: int = 0
    exact: bool = True


@dataclass(frozen=True)
class Answer:
    """The output of a request, with the log-probabilities of its tokens and of its prompt, if it requests them."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[Logprob] = field(default_factory=list[Logprob])
    scores: list[Logprob] = field(default_factory=list[Logprob])
    finish: str | None = None

    def until(self, length: int) -> "Answer":
        """Return the answer as if it were canceled after `length` tokens."""
        return Answer(self.tokens[:length], self.logprobs[:length], self.scores)

    def differs(self, expected: "Answer", exact: bool) -> bool:
        """Return whether this answer is not `expected`, by more than rounding unless `exact`."""
        if exact:
            canceled_in_prompt = expected.finish is None and not self.tokens
            scores = expected.scores[: len(self.scores)] if canceled_in_prompt else expected.scores
            return self != replace(expected, scores=scores)
        if (self.tokens, self.finish) == (expected.tokens, expected.finish):
            return False
        pairs = zip(self.tokens, expected.tokens, strict=False)
        first = next((index for index, (token, other) in enumerate(pairs) if token != other), None)
        if first is None:
            return True
        found, wanted = (dict(answer.logprobs[first][1]) for answer in (self, expected))
        common = found.keys() & wanted.keys()
        return not common or max(abs(found[token] - wanted[token]) for token in common) > _ROUNDING


@dataclass(frozen=True)
class Case:
    """A request with the pixels of its images."""

    request: Generate
    images: list[PreparedImage]

    def sequence(self, subject: Subject) -> Sequence:
        grammar = self.request.grammar
        matcher = GrammarMatcher(LLMatcher(subject.vocabulary, grammar, log_level=0)) if grammar else None
        return Sequence(self.request, matcher=matcher, pixels=[image.pixels for image in self.images])


def random_cases(chance: random.Random, subject: Subject, count: int) -> list[Case]:
    """Return requests of which many have a common beginning."""
    lengths = (40, PAGE_SIZE, 2 * PAGE_SIZE)
    stems = [[*_text(chance, chance.choice(lengths)), chance.choice(_images(subject)), 8, 9] for _ in range(2)]
    return [_case(chance, subject, number, chance.choice(stems)) for number in range(count)]


def _case(chance: random.Random, subject: Subject, number: int, stem: list[int | PreparedImage]) -> Case:
    common = chance.choice((0, PAGE_SIZE, len(stem) - 3, len(stem), len(stem)))
    parts = [*stem[:common], *_text(chance, chance.choice((1, 2, 9, 30, 55, 60)))]
    if chance.random() < 0.3:
        parts[-1] = chance.choice(_images(subject))
    images = [part for part in parts if isinstance(part, PreparedImage)]
    tokens = [subject.image_token if isinstance(part, PreparedImage) else part for part in parts]
    prompt, ranges = tokens, []
    if images:
        prompt, ranges = expanded_tokens(tokens, subject.image_token, [image.layout for image in images])
    sampling = SamplingParams(temperature=0)
    if chance.random() < 0.5:
        sampling = SamplingParams(
            temperature=chance.choice((0, 0.7)),
            top_p=chance.choice((0.9, 1.0)),
            top_k=chance.choice((0, 20)),
            min_p=chance.choice((0.0, 0.0, 0.02)),
            repetition_penalty=chance.choice((1.0, 1.2)),
            frequency_penalty=chance.choice((0.0, 0.0, 0.4)),
            presence_penalty=chance.choice((0.0, 0.0, 0.3)),
            seed=chance.randrange(1000),
            logit_bias=chance.choice(({}, dict.fromkeys(chance.sample(range(1, LETTERS), 2), 6.0))),
        )
    request = Generate(
        id=number,
        prompt=prompt,
        max_tokens=chance.randint(1, 24),
        sampling=sampling,
        stop_ids=chance.sample(range(LETTERS), 2),
        salt=chance.choice(("", "", "", "other")),
        turn=chance.choice((0, common, common)),
        grammar=chance.choice(_GRAMMARS) if chance.random() < 0.2 else "",
        images=[PromptImage(image.digest, image.layout) for image in images],
        image_ranges=ranges,
    )
    alternatives = chance.choice((None, 0, 3)) if subject.exact else 5
    scored = alternatives if subject.exact and not images and chance.random() < 0.2 else None
    return Case(
        msgspec.structs.replace(
            request, prompt_logprobs=scored, sampling=msgspec.structs.replace(sampling, logprobs=alternatives)
        ),
        images,
    )


def outputs_alone(subject: Subject, cases: list[Case]) -> dict[int, Answer]:
    """Return the answer of each request, without other requests and without a cache."""
    outputs: dict[int, Answer] = {}
    for case in cases:
        outputs |= _run(subject, _scheduler(subject, _ALONE, 0, 0), [case], False, lambda scheduler: None, lambda: True)
    return outputs


def count_differences(subject: Subject, cases: list[Case], chance: random.Random, schedules: int = 2) -> Counter[str]:
    """Run all requests in random schedules. Return the numbers of compared and of different outputs, and others."""
    alone = outputs_alone(subject, cases)
    counts: Counter[str] = Counter()
    for _ in range(schedules):
        counts += _compare(subject, cases, alone, chance)
    return counts


def _compare(subject: Subject, cases: list[Case], alone: dict[int, Answer], chance: random.Random) -> Counter[str]:
    counts: Counter[str] = Counter()
    canceled: set[int] = set()
    longest = max(len(case.request.prompt) + case.request.max_tokens for case in cases)
    options = EngineOptions(
        max_step_tokens=chance.choice((16, 32, 100, 512)),
        max_sequences=chance.choice((2, 4, SEQUENCES)),
        speculation=chance.random() < 0.6,
        speculation_max_sequences=SEQUENCES,
        prefix_reuse=chance.choice(("all", "all", "principal", "off")),
        step_timing="fixed",
    )
    pages = -(-longest // PAGE_SIZE) + chance.choice((0, 1, 3, 20))
    scheduler = _scheduler(subject, options, pages, chance.choice((0, 1, 1, 2, 6)), chance)
    cancel_rate, pace = chance.choice((0.0, 0.02)), chance.choice((0.1, 0.3, 0.9))
    preempt = scheduler.queues.preempt

    def count_preemption(sequence: Sequence) -> None:
        counts["preemptions"] += 1
        preempt(sequence)

    scheduler.queues.preempt = count_preemption  # type: ignore[method-assign]

    def cancel(scheduler: Scheduler) -> None:
        if chance.random() < cancel_rate and not scheduler.idle:
            sequence = chance.choice([*scheduler.running, *scheduler.waiting])
            canceled.add(sequence.id)
            scheduler.cancel(sequence.id)

    outputs = _run(subject, scheduler, cases, chance.random() < 0.5, cancel, lambda: chance.random() < pace)
    for case in cases:
        number = case.request.id
        answer, expected = outputs[number], alone[number]
        if number in canceled:
            expected = expected.until(len(answer.tokens))
        counts["compared"] += 1
        counts["different"] += answer.differs(expected, subject.exact)
    counts["canceled"] += len(canceled)
    counts["cached"] += scheduler.queues.cached_tokens
    counts["drafted"] += scheduler.committer.model_drafts.drafted
    counts["accepted"] += scheduler.committer.model_drafts.accepted
    return counts


def _run(
    subject: Subject,
    scheduler: Scheduler,
    cases: list[Case],
    overlap: bool,
    before_step: Callable[[Scheduler], None],
    adds: Callable[[], bool],
) -> dict[int, Answer]:
    """Run all requests. Add a request while `adds` returns True."""
    steps = Steps(subject.runner, scheduler, overlap)
    answers = {case.request.id: Answer() for case in cases}
    waiting = list(cases)
    while waiting or not steps.idle:
        while waiting and adds():
            assert scheduler.add(waiting.pop(0).sequence(subject)) is None
        before_step(scheduler)
        for output in steps.advance():
            assert output.error is None, output.error
            answer = answers[output.id]
            answers[output.id] = Answer(
                answer.tokens + output.tokens,
                answer.logprobs + output.logprobs,
                answer.scores + output.prompt_logprobs,
                output.finish,
            )
    scheduler.check_idle()
    return answers


class AnyDrafts(DraftGate):
    """A gate that lets random sequences draft, at any cost: no decision may change the tokens."""

    def __init__(self, chance: random.Random, share: float = 0.8) -> None:
        super().__init__(ratio=1.0, fixed=True)
        self._chance, self._share = chance, share

    @property
    def rests(self) -> bool:
        return self._share < 1.0 and self._chance.random() < 0.1

    def choose(self, candidates: Collection[Candidate], rows: int) -> tuple[int, list[ModelDrafter]]:
        chosen = [each.drafter for each in candidates if each.missing <= 128 and self._chance.random() < self._share]
        return self._chance.choice((1, 3, 5)) if chosen else 0, chosen


def _scheduler(
    subject: Subject, options: EngineOptions, pages: int, snapshots: int, chance: random.Random | None = None
) -> Scheduler:
    facts, encoder = subject.runner.facts, subject.runner.encoder
    states = StatePool(options.max_sequences, min(snapshots, facts.snapshots)) if facts.state_bytes else None
    pages = min(pages or facts.kv_pages, facts.kv_pages)
    windows = None
    if facts.window is not None and facts.window_pages:
        step_tokens = options.max_step_tokens + 2 * PAGE_SIZE  # an image may exceed the token budget
        needed = window_pages_needed(facts.window, PAGE_SIZE, options.max_sequences, step_tokens, MAX_DRAFTS)
        windows = WindowPages(min(needed, facts.window_pages), pages, PAGE_SIZE, facts.window)
    pool = PagePool(pages, PAGE_SIZE, windows)
    traits = TEXT_TRAITS if encoder is None else encoder.traits
    scheduler = Scheduler(options, pool, states, None, traits, facts.window, facts.drafts)
    if facts.drafts is not None and chance is not None:
        scheduler.planner.gate = AnyDrafts(chance)
    return scheduler


def _images(subject: Subject) -> list[Any]:
    return [*subject.images] or [7]


def _text(chance: random.Random, length: int) -> list[Any]:
    return [chance.randrange(1, LETTERS) for _ in range(length)]
