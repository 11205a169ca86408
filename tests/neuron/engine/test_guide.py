"""Grammars in the engine: what is said follows them, in whatever company and however it is computed."""

import json
import random
import re
from collections.abc import Sequence as Rows
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from simulation import SimulatedCache

from helexa.neuron.engine.guide import Guide
from helexa.neuron.engine.masks import MaskThread
from helexa.neuron.engine.messages import EngineOptions, Generate, SamplingParams, TokenOutput
from helexa.neuron.engine.pages import PagePool
from helexa.neuron.engine.sampler import rows_of, sample
from helexa.neuron.engine.scheduler import Plan, Scheduler
from helexa.neuron.engine.sequence import Sequence
from helexa.neuron.engine.vocabulary import read_vocabulary

WIDTH = 49152
END = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 150},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["first_name", "age_in_years", "favourite_colour"],
    "additionalProperties": False,
}
JSON = LLMatcher.grammar_from_json_schema(SCHEMA, {"whitespace_flexible": False})
DIGITS = LLMatcher.grammar_from_regex("[0-9]{3,9}")
COLOUR = LLMatcher.grammar_from_regex("(red|green|blue), as the sky is")


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> LLTokenizer:
    return read_vocabulary(smollm2_gguf, WIDTH)


class Speaker:
    """Runs plans with logits that depend on the tokens before alone, and checks what the cache would hold."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.masks = MaskThread(WIDTH)
        self.cache = SimulatedCache(scheduler)

    def run(self, plan: Plan) -> list[int]:
        rows = rows_of(plan)
        with self.masks.beside(plan) as restrict:
            self.cache.run(plan)
            if not rows:
                return []
            logits = torch.stack([_logits((*row.sequence.tokens, *row.drafts)) for row in rows])
            return sample(logits, rows, restrict=restrict)


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


def answers(
    tokenizer: LLTokenizer, requests: Rows[Generate], pages: int = 1000, **options: object
) -> dict[int, list[TokenOutput]]:
    scheduler = Scheduler(EngineOptions(**options), PagePool(pages, 4))  # type: ignore[arg-type]
    speaker = Speaker(scheduler)
    for one in requests:
        matcher = LLMatcher(tokenizer, one.grammar, log_level=0) if one.grammar else None
        assert matcher is None or not matcher.is_error(), matcher.get_error()
        guide = None if matcher is None else Guide(matcher)
        assert scheduler.add(Sequence(one, guide=guide)) is None
    outputs: dict[int, list[TokenOutput]] = {one.id: [] for one in requests}
    while not scheduler.idle:
        plan = scheduler.plan()
        for output in scheduler.commit(plan, speaker.run(plan)):
            outputs[output.id].append(output)
    scheduler.check_idle()
    return outputs


def said(outputs: Rows[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def text(tokenizer: LLTokenizer, outputs: Rows[TokenOutput]) -> str:
    return tokenizer.decode_bytes([token for token in said(outputs) if token != END]).decode()


SETTINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, seed=5),
    SamplingParams(temperature=2, seed=6, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.7, seed=7, top_k=3, repetition_penalty=1.5, presence_penalty=1.0),
    SamplingParams(temperature=1, seed=8, logit_bias=dict.fromkeys(range(3, 300), 100.0)),
]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_every_setting_yields_what_the_schema_asks_for(tokenizer: LLTokenizer, sampling: SamplingParams) -> None:
    (outputs,) = answers(tokenizer, [request(0, JSON, sampling=sampling)]).values()
    assert outputs[-1].finish == "stop"
    assert END not in said(outputs), "it is over when nothing may follow"
    jsonschema.validate(json.loads(text(tokenizer, outputs)), SCHEMA)


def test_an_end_is_said_where_more_might_follow(tokenizer: LLTokenizer) -> None:
    eager = SamplingParams(temperature=0, logit_bias={END: 100.0})
    (outputs,) = answers(tokenizer, [request(0, DIGITS, sampling=eager)]).values()
    assert said(outputs)[-1] == END
    assert re.fullmatch("[0-9]{3,9}", text(tokenizer, outputs))
    (outputs,) = answers(tokenizer, [request(0, DIGITS, sampling=eager, stop_ids=[])]).values()
    assert outputs[-1].finish == "stop", "even if the request knows no end"


def test_what_is_cut_by_length_has_begun_rightly(tokenizer: LLTokenizer) -> None:
    (whole,) = answers(tokenizer, [request(0, JSON)]).values()
    for length in range(1, 12):
        (outputs,) = answers(tokenizer, [request(0, JSON, max_tokens=length)]).values()
        assert (said(outputs), outputs[-1].finish) == (said(whole)[:length], "length")


REQUESTS = [request(n, (JSON, DIGITS, COLOUR, "")[n % 4], max_tokens=40) for n in range(8)]


@pytest.mark.parametrize(
    "circumstances",
    [
        {"speculation": False},
        {"speculation_max_sequences": 64},
        {"max_step_tokens": 8, "speculation_max_sequences": 64},
        {"pages": 40},
        {"pages": 40, "speculation_max_sequences": 64},
        {"max_sequences": 2},
    ],
)
def test_company_chunks_drafts_and_preemption_change_nothing(
    tokenizer: LLTokenizer, circumstances: dict[str, int]
) -> None:
    together = answers(tokenizer, REQUESTS, **circumstances)
    for one in REQUESTS:
        (alone,) = answers(tokenizer, [one], speculation=False).values()
        assert said(together[one.id]) == said(alone)
        assert together[one.id][-1].finish == alone[-1].finish


def test_what_is_forced_takes_fewer_steps(tokenizer: LLTokenizer) -> None:
    (outputs,) = answers(tokenizer, [request(0, COLOUR)]).values()
    assert len(outputs) < len(said(outputs))
    (slowly,) = answers(tokenizer, [request(0, COLOUR)], speculation=False).values()
    assert said(outputs) == said(slowly)


def test_masks_follow_every_draft_and_leave_the_guide_where_it_was(tokenizer: LLTokenizer) -> None:
    rng = random.Random(1)
    grammar = LLMatcher(tokenizer, JSON)
    tokens = tokenizer.tokenize_str('{"first_name":"Ada","age_in_years":36,"favourite_colour":"red"}')
    guide, plain = Guide(grammar.deep_copy()), grammar.deep_copy()
    expected = []
    for token in tokens:
        expected.append(np.frombuffer(plain.compute_bitmask(), dtype=np.uint8)[: WIDTH // 8])
        assert plain.consume_token(token)
    at = 0
    while at < len(tokens):
        drafts = tokens[at : at + rng.randint(0, 5)]
        wrong = rng.random() < 0.5
        masks = np.full((len(drafts) + 1 + wrong, WIDTH // 8), 0xFF, dtype=np.uint8)
        guide.fill([*drafts, END] if wrong else drafts, masks)
        for row in range(min(len(drafts) + 1, len(tokens) - at)):
            assert (masks[row] == expected[at + row]).all()
        guide.advance(tokens[at])
        at += 1
    assert guide.ended
    assert not guide.error


def test_an_end_as_a_draft_is_taken_back(tokenizer: LLTokenizer) -> None:
    guide = Guide(LLMatcher(tokenizer, DIGITS))
    for token in tokenizer.tokenize_str("123"):
        guide.advance(token)
    masks = np.full((3, WIDTH // 8), 0xFF, dtype=np.uint8)
    guide.fill([END, END], masks)
    assert not guide.ended
    guide.advance(tokenizer.tokenize_str("4")[0])
    assert not guide.error


def test_a_sequence_that_goes_astray_ends_alone(tokenizer: LLTokenizer) -> None:
    scheduler = Scheduler(EngineOptions(), PagePool(100, 4))
    astray = Guide(LLMatcher(tokenizer, DIGITS, log_level=0))
    scheduler.add(Sequence(request(0, DIGITS), guide=astray))
    scheduler.add(Sequence(request(1, "", max_tokens=2)))
    plan = scheduler.plan()
    first = scheduler.commit(plan, [5000] * 2)
    assert [(output.id, output.finish) for output in first] == [(0, "error"), (1, None)]
    assert "grammar" in (first[0].error or "")
    assert first[0].tokens == []
    assert [output.finish for output in scheduler.commit(scheduler.plan(), [5000])] == ["length"]
    scheduler.check_idle()
