"""Grammars in the engine: outputs follow them in every batch, with chunks, drafts and preemption."""

import itertools
import json
import random
import re
from collections.abc import Sequence as Rows
from functools import partial
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from simulated_cache import SimulatedCache
from tokenizers import AddedToken, Tokenizer, decoders, models

from helexa.neuron.engine.execution.step_builder_and_penalties import sampled_rows, sampling_of
from helexa.neuron.engine.grammar_matcher import GrammarMatcher, read_vocabulary
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams, TokenOutput
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool
from helexa.neuron.engine.scheduling.ngrams_and_counts import Drafter
from helexa.neuron.engine.scheduling.plan import Plan, PlanEntry, rejection_masks
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_output_logprobs_and_pooling import Sampled
from helexa.neuron.ops.kernel_header import MAX_DRAFTS
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from nightly import cases

WIDTH = 49152
END = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 150},
        "favorite_color": {"enum": ["red", "green", "blue"]},
    },
    "required": ["first_name", "age_in_years", "favorite_color"],
    "additionalProperties": False,
}
JSON = LLMatcher.grammar_from_json_schema(SCHEMA, {"whitespace_flexible": False})
DIGITS = LLMatcher.grammar_from_regex("[0-9]{3,9}")
COLOR = LLMatcher.grammar_from_regex("(red|green|blue), as the sky is")


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> LLTokenizer:
    return read_vocabulary(smollm2_gguf, WIDTH)


OPS = ReferenceOps(torch.device("cpu"), torch.float32)


class RandomModel:
    """Runs plans with logits that depend only on the previous tokens, and checks the simulated cache."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.cache = SimulatedCache(scheduler)

    def run(self, plan: Plan) -> list[int]:
        rows = list(sampled_rows([entry for entry in plan if entry.samples]))
        self.cache.run(plan)
        if not rows:
            return []
        logits = torch.stack([_logits((*sequence.tokens, *drafts)) for sequence, drafts in rows])
        return Sampled(OPS, logits, sampling_of(rows)).read(partial(rejection_masks, plan))


def _logits(tokens: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(tokens) & 0xFFFFFFFF)
    return torch.randn(WIDTH, generator=generator) * 3


def request(number: int, grammar: str, **fields: object) -> Generate:
    settings: dict[str, object] = {
        "prompt": [100 + number, *range(200, 230)],
        "max_tokens": 80,
        "sampling": SamplingParams(seed=number),
        "stop_ids": [END],
    }
    return Generate(id=number, grammar=grammar, **(settings | fields))  # type: ignore[arg-type]


def complete(
    tokenizer: LLTokenizer, requests: Rows[Generate], pages: int = 1000, **options: object
) -> dict[int, list[TokenOutput]]:
    scheduler = Scheduler(EngineOptions(**options), PagePool(pages, 4))  # type: ignore[arg-type]
    for message in requests:
        matcher = LLMatcher(tokenizer, message.grammar, log_level=0) if message.grammar else None
        assert matcher is None or not matcher.is_error(), matcher.get_error()
        grammar_matcher = None if matcher is None else GrammarMatcher(matcher)
        assert scheduler.add(Sequence(message, matcher=grammar_matcher)) is None
    return run(scheduler)


def run(scheduler: Scheduler) -> dict[int, list[TokenOutput]]:
    """Run until all sequences have ended; return the outputs by sequence id."""
    model = RandomModel(scheduler)
    outputs: dict[int, list[TokenOutput]] = {sequence.id: [] for sequence in scheduler.waiting}
    while not scheduler.idle:
        plan = scheduler.plan()
        for output in scheduler.commit(plan, model.run(plan)):
            outputs[output.id].append(output)
    scheduler.check_idle()
    return outputs


def tokens_of(outputs: Rows[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def text(tokenizer: LLTokenizer, outputs: Rows[TokenOutput]) -> str:
    return tokenizer.decode_bytes([token for token in tokens_of(outputs) if token != END]).decode()


SETTINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, seed=5),
    SamplingParams(temperature=2, seed=6, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.7, seed=7, top_k=3, repetition_penalty=1.5, presence_penalty=1.0),
    SamplingParams(temperature=1, seed=8, logit_bias=dict.fromkeys(range(3, 300), 100.0)),
]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_output_follows_the_json_schema_with_any_sampling_settings(
    tokenizer: LLTokenizer, sampling: SamplingParams
) -> None:
    (outputs,) = complete(tokenizer, [request(0, JSON, sampling=sampling)]).values()
    assert outputs[-1].finish == "stop"
    assert END not in tokens_of(outputs), "a grammar that allows no further token ends without an end token"
    jsonschema.validate(json.loads(text(tokenizer, outputs)), SCHEMA)


def test_end_token_is_allowed_exactly_where_the_grammar_may_end(tokenizer: LLTokenizer) -> None:
    eager = SamplingParams(temperature=0, logit_bias={END: 100.0})
    (outputs,) = complete(tokenizer, [request(0, DIGITS, sampling=eager)]).values()
    assert tokens_of(outputs)[-1] == END
    assert re.fullmatch("[0-9]{3,9}", text(tokenizer, outputs))
    (outputs,) = complete(tokenizer, [request(0, DIGITS, sampling=eager, stop_ids=[])]).values()
    assert outputs[-1].finish == "stop", "an end token ends the output even without `stop_ids`"


def test_output_cut_by_max_tokens_is_a_prefix_of_the_full_output(tokenizer: LLTokenizer) -> None:
    (expected,) = complete(tokenizer, [request(0, JSON)]).values()
    for length in range(1, 12):
        (outputs,) = complete(tokenizer, [request(0, JSON, max_tokens=length)]).values()
        assert (tokens_of(outputs), outputs[-1].finish) == (tokens_of(expected)[:length], "length")


REQUESTS = [request(n, (JSON, DIGITS, COLOR, "")[n % 4], max_tokens=40) for n in range(8)]


@pytest.mark.parametrize(
    "options",
    [
        {"speculation": False},
        {"speculation_max_sequences": 64},
        {"max_step_tokens": 8, "speculation_max_sequences": 64},
        {"pages": 40},
        {"pages": 40, "speculation_max_sequences": 64},
        {"max_sequences": 2},
    ],
)
def test_tokens_with_a_grammar_do_not_depend_on_batching_chunks_drafts_or_preemption(
    tokenizer: LLTokenizer, options: dict[str, int]
) -> None:
    together = complete(tokenizer, REQUESTS, **options)
    for message in REQUESTS:
        (expected,) = complete(tokenizer, [message], speculation=False).values()
        assert tokens_of(together[message.id]) == tokens_of(expected)
        assert together[message.id][-1].finish == expected[-1].finish


def test_tokens_that_the_grammar_forces_are_drafted_and_take_fewer_steps(tokenizer: LLTokenizer) -> None:
    (outputs,) = complete(tokenizer, [request(0, COLOR)]).values()
    assert len(outputs) < len(tokens_of(outputs))
    (slowly,) = complete(tokenizer, [request(0, COLOR)], speculation=False).values()
    assert tokens_of(outputs) == tokens_of(slowly)


def test_token_masks_for_rows_with_rejected_drafts_leave_the_matcher_state_unchanged(tokenizer: LLTokenizer) -> None:
    rng = random.Random(1)
    grammar = LLMatcher(tokenizer, JSON)
    tokens = tokenizer.tokenize_str('{"first_name":"Ada","age_in_years":36,"favorite_color":"red"}')
    grammar_matcher, plain = GrammarMatcher(grammar.deep_copy()), grammar.deep_copy()
    expected = []
    for token in tokens:
        expected.append(np.frombuffer(plain.compute_bitmask(), dtype=np.uint8))
        assert plain.consume_token(token)
    for at, token in enumerate(tokens):
        drafts = tokens[at : at + rng.randint(0, 5)]
        wrong = rng.randint(0, len(drafts))
        chosen = [*drafts, END]
        chosen[wrong] = 5000  # a token that only the name may contain
        masks = grammar_matcher.rejection_masks(chosen, drafts)
        if at + wrong < len(tokens):
            barred = not np.unpackbits(expected[at + wrong], bitorder="little")[5000]
            assert masks.keys() == (
                {wrong, len(drafts)} if barred and at + len(drafts) < len(tokens) else {wrong} if barred else set()
            )
        assert all((mask == expected[at + row]).all() for row, mask in masks.items())
        grammar_matcher.advance(token)
    assert grammar_matcher.ended
    assert not grammar_matcher.error


def test_matcher_rejects_exactly_the_tokens_that_the_grammar_disallows(tokenizer: LLTokenizer) -> None:
    rng = random.Random(2)
    for grammar in (JSON, DIGITS, COLOR, LLMatcher.grammar_from_lark("start: /[a-z]*/ <|im_end|>")):
        grammar_matcher, plain = GrammarMatcher(LLMatcher(tokenizer, grammar)), LLMatcher(tokenizer, grammar)
        for _ in range(20):
            if grammar_matcher.ended:
                break
            mask = np.frombuffer(plain.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(mask, bitorder="little")[:WIDTH]
            for token in (*rng.sample(range(WIDTH), 200), *rng.choices(np.flatnonzero(bits).tolist(), k=20), END):
                masks = grammar_matcher.rejection_masks([token], ())
                assert [*masks] == [0][bits[token] :], token
                assert all((actual == mask).all() for actual in masks.values())
            token = int(rng.choice(np.flatnonzero(bits)))
            grammar_matcher.advance(token)
            assert plain.consume_token(token)
        assert not grammar_matcher.error


def test_token_rejected_by_the_grammar_is_redrawn_from_the_allowed_tokens_in_proportion(tokenizer: LLTokenizer) -> None:
    allowed = [tokenizer.tokenize_str(letter)[0] for letter in "0123456789"]
    logits = torch.full((WIDTH,), -torch.inf)
    weights = torch.arange(1, 11, dtype=torch.float32)
    logits[allowed] = weights.log()
    logits[5000] = weights.sum().log()  # half of the drawn tokens are rejected
    counts = torch.zeros(WIDTH)
    grammar_matcher = GrammarMatcher(LLMatcher(tokenizer, LLMatcher.grammar_from_regex("[0-9]")))
    draws = cases(1000, 4000)
    for seed in range(draws):
        sequence = Sequence(
            request(0, DIGITS, sampling=SamplingParams(temperature=1, seed=seed)), matcher=grammar_matcher
        )
        plan = [PlanEntry(sequence, len(sequence.tokens))]
        counts[
            Sampled(OPS, logits[None].clone(), sampling_of([(sequence, ())])).read(partial(rejection_masks, plan))
        ] += 1
    shares = weights / weights.sum()
    assert counts[allowed].sum() == draws
    assert ((counts[allowed] / draws - shares).abs() < 4 * (shares * (1 - shares) / draws).sqrt()).all()


def test_end_token_in_drafts_does_not_end_the_matcher(tokenizer: LLTokenizer) -> None:
    grammar_matcher = GrammarMatcher(LLMatcher(tokenizer, DIGITS))
    for token in tokenizer.tokenize_str("123"):
        grammar_matcher.advance(token)
    assert grammar_matcher.rejection_masks([END, END, END], [END, END]) == {}
    assert not grammar_matcher.ended
    grammar_matcher.advance(tokenizer.tokenize_str("4")[0])
    assert not grammar_matcher.error


def test_token_that_the_grammar_disallows_fails_only_its_sequence(
    tokenizer: LLTokenizer,
) -> None:
    scheduler = Scheduler(EngineOptions(), PagePool(100, 4))
    grammar_matcher = GrammarMatcher(LLMatcher(tokenizer, DIGITS, log_level=0))
    scheduler.add(Sequence(request(0, DIGITS), matcher=grammar_matcher))
    scheduler.add(Sequence(request(1, "", max_tokens=2)))
    plan = scheduler.plan()
    first = scheduler.commit(plan, [5000] * 2)
    assert [(output.id, output.finish) for output in first] == [(0, "error"), (1, None)]
    assert first[0].error == "the engine chose token 5000, which the grammar does not allow; try again"
    assert not first[0].bad_grammar
    assert first[0].tokens == []
    assert [output.finish for output in scheduler.commit(scheduler.plan(), [5000])] == ["length"]
    scheduler.check_idle()


class RecordingDrafter(Drafter):
    """Records the lengths of its drafts, and the lengths passed to `learn`."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(tokens)
        self.drafted: set[int] = set()
        self.learned: set[int] = set()

    def draft(self, limit: int) -> tuple[int, ...]:
        draft = super().draft(limit)
        self.drafted |= {*range(1, len(draft) + 1)}  # a grammar may shorten a draft
        return draft

    def learn(self, drafted: int, accepted: int) -> None:
        self.learned.add(drafted)
        super().learn(drafted, accepted)


def test_forced_token_drafts_respect_the_draft_limit_and_do_not_train_the_drafter(tokenizer: LLTokenizer) -> None:
    grammar = LLMatcher.grammar_from_regex("(yes|no): " + "the quick brown fox jumps over the lazy dog, " * 20)
    scheduler = Scheduler(EngineOptions(), PagePool(1000, 4))
    sequence = Sequence(request(0, grammar, max_tokens=400), matcher=GrammarMatcher(LLMatcher(tokenizer, grammar)))
    sequence.drafter = RecordingDrafter(sequence.tokens)
    scheduler.add(sequence)
    model = RandomModel(scheduler)
    lengths: set[int] = set()
    while not scheduler.idle:
        plan = scheduler.plan()
        lengths |= {len(entry.drafts) for entry in plan}
        scheduler.commit(plan, model.run(plan))
    assert sequence.generated > 180
    assert max(lengths) == MAX_DRAFTS
    assert sequence.drafter.learned <= sequence.drafter.drafted


AMBIGUOUS = LLMatcher.grammar_from_lark('start: s "b"?\ns: s s | "a" | s s s')
NARROW = LLParserLimits(max_items_in_row=200, verbose_errors=False)


def narrow(tokenizer: LLTokenizer) -> tuple[LLMatcher, int, int, int]:
    """Return a matcher of a grammar near a parser limit.

    Returns:
        The matcher; the number of `repeated` tokens after which the parser exceeds its limit; the `repeated` token;
        a token that is allowed at any time and ends the grammar.
    """
    many, last = (tokenizer.tokenize_str(letters)[0] for letters in ("aaaaaaaa", "b"))
    matcher = LLMatcher(tokenizer, AMBIGUOUS, log_level=0, limits=NARROW)
    probe, most = GrammarMatcher(matcher), -1
    while not probe.error:
        probe.advance(many)
        most += 1
    return matcher, most, many, last


@pytest.mark.parametrize("ahead", range(4))
def test_matcher_error_within_rejected_drafts_is_ignored(tokenizer: LLTokenizer, ahead: int) -> None:
    matcher, most, many, last = narrow(tokenizer)
    fitting, filled = GrammarMatcher(matcher), GrammarMatcher(matcher)
    for grammar_matcher in (fitting, filled):
        for _ in range(most - ahead):
            grammar_matcher.advance(many)
    drafts = (many,) * 5
    fitting.fitting(drafts)
    filled.rejection_masks((*drafts, many), drafts)
    assert filled.ahead <= ahead
    for grammar_matcher in (fitting, filled):
        assert not grammar_matcher.error
        grammar_matcher.advance(last)
        assert (grammar_matcher.error, grammar_matcher.ended) == ("", True)


def test_grammar_error_is_the_same_with_and_without_drafts(tokenizer: LLTokenizer) -> None:
    matcher, most, many, _ = narrow(tokenizer)
    eager = SamplingParams(temperature=0, logit_bias={many: 100.0})
    errors: set[str | None] = set()
    for speculation in (False, True):
        scheduler = Scheduler(EngineOptions(speculation=speculation), PagePool(100, 4))
        scheduler.add(
            Sequence(request(0, AMBIGUOUS, prompt=[5, *[many] * 20], sampling=eager), matcher=GrammarMatcher(matcher))
        )
        (outputs,) = run(scheduler).values()
        assert (outputs[-1].finish, outputs[-1].bad_grammar) == ("error", True)
        errors.add(outputs[-1].error)
        assert 0 < len(tokens_of(outputs)) <= most, "the tokens of the failed step are not reported"
    assert len(errors) == 1


def test_grammar_that_exceeds_its_time_limit_fails_only_its_sequence(tokenizer: LLTokenizer) -> None:
    seconds = itertools.count()
    slow = GrammarMatcher(LLMatcher(tokenizer, JSON), clock=lambda: next(seconds) / 10)
    scheduler = Scheduler(EngineOptions(), PagePool(100, 4))
    scheduler.add(Sequence(request(0, JSON), matcher=slow))
    scheduler.add(Sequence(request(1, JSON, max_tokens=30), matcher=GrammarMatcher(LLMatcher(tokenizer, JSON))))
    outputs = run(scheduler)
    assert outputs[0][-1].bad_grammar
    assert "too long" in (outputs[0][-1].error or "")
    assert outputs[1][-1].finish in ("stop", "length")
    assert len(tokens_of(outputs[1])) > len(tokens_of(outputs[0]))


def test_end_token_that_is_not_marked_special_cannot_appear_inside_text(tmp_path: Path) -> None:
    letters = [*map(chr, range(0x21, 0x7F)), "Ġ", "</s>"]
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("</s>", special=False, normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    end = len(letters) - 1
    grammar_matcher = GrammarMatcher(
        LLMatcher(read_vocabulary(tmp_path, len(letters)), LLMatcher.grammar_from_regex('"[ -~]*"'))
    )
    allowed: list[tuple[bool, bool]] = []
    for letter in '"<"':
        grammar_matcher.advance(letters.index(letter))
        allowed.append(
            (
                not grammar_matcher.rejection_masks([letters.index("<")], ()),
                not grammar_matcher.rejection_masks([end], ()),
            )
        )
    assert allowed == [(True, False), (True, False), (True, True)], "the end is allowed after the closing quote"
