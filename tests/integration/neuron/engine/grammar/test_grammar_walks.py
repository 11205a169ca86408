"""Random walks with drafts over real vocabularies: the matcher's state always equals that of its output."""

import random
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from helexa.neuron.engine.grammar_matcher import GrammarMatcher, Mask, read_vocabulary
from helexa.neuron.grammar import for_tools
from helexa.neuron.grammar.grammar_check_and_rejection import PARSER_LIMITS
from helexa.neuron.parsers.formats.tool_call_format import TOOL_CALL_FORMATS
from helexa.neuron.text.model_text import ModelText
from neuron.grammar.random_walks import byte_level
from neuron.parsers.piecewise_parsing import DAILY_FORMATS
from nightly import NIGHTLY, cases, daily

WALKS = cases(2, 40, "HELEXA_TEST_WALKS")
LENGTH = 60
MOST_DRAFTS = 7
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2, 30]}},
        "required": ["days"],
    },
    "now": {"type": "object", "properties": {}},
}


class Walk:
    """A walk through the grammar of required tool calls, with the scheduler's calls: drafts, choices, masks, output.

    Attributes:
        output: tokens by which the matcher was advanced.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: str, seed: int) -> None:
        self.output: list[int] = []
        self._rng = random.Random(seed)
        self._width = tokenizer.vocab_size
        self._initial = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        assert not self._initial.is_error(), self._initial.get_error()
        self.matcher = GrammarMatcher(self._initial)

    def run(self) -> None:
        """Walk until the grammar ends; check the matcher after every step."""
        while len(self.output) < LENGTH and not self.matcher.ended:
            self._step()
            assert not self.matcher.error, f"{self.matcher.error} after {self.output}"
            fresh = self._fresh()
            assert self.matcher.ended == fresh.is_stopped(), self.output
            if not fresh.is_stopped():
                self._compare(np.frombuffer(fresh.compute_bitmask(), dtype=np.uint8))

    def _step(self) -> None:
        drafts = self._drafts()
        wrong = self._rng.choice([len(drafts), self._rng.randint(0, len(drafts))])
        chosen = [*drafts[:wrong], *self._rng.choices(range(self._width), k=len(drafts) - wrong + 1)]
        for row, mask in self.matcher.rejection_masks(chosen, drafts).items():
            chosen[row] = self._any_of(mask)
        accepted = 0
        while accepted < self.matcher.ahead and chosen[accepted] == drafts[accepted]:
            accepted += 1
        for token in chosen[: accepted + 1]:
            self.matcher.advance(token)
            self.output.append(token)
            if self.matcher.ended:
                break

    def _drafts(self) -> tuple[int, ...]:
        """Return drafts: none for the first token, else the forced tokens or a random continuation."""
        if not self.output or self._rng.random() < 0.2:
            return ()
        if forced := self.matcher.forced(self._rng.randint(1, MOST_DRAFTS)):
            return forced
        ahead, drafts = self._fresh(), list[int]()
        while len(drafts) < MOST_DRAFTS and not ahead.is_stopped():
            drafts.append(self._any_of(np.frombuffer(ahead.compute_bitmask(), dtype=np.uint8)))
            ahead.consume_token(drafts[-1])
        return self.matcher.fitting(tuple(drafts[: self._rng.randint(0, len(drafts))]))

    def _compare(self, expected: Mask) -> None:
        """Check that the matcher's mask is `expected`."""
        barred = [token for token in self._rng.choices(range(self._width), k=20) if not _has(expected, token)]
        if barred:
            masks = self.matcher.rejection_masks(barred[:1], ())
            assert masks.keys() == {0}
            assert (masks[0] == expected).all(), self.output
        assert self.matcher.rejection_masks([self._any_of(expected)], ()) == {}

    def _fresh(self) -> LLMatcher:
        matcher = self._initial.deep_copy()
        assert matcher.consume_tokens(self.output), matcher.get_error()
        return matcher

    def _any_of(self, mask: Mask) -> int:
        """Return a random token whose bit is set."""
        byte = int(self._rng.choice(np.flatnonzero(mask)))
        return self._rng.choice([token for token in range(8 * byte, 8 * byte + 8) if _has(mask, token)])


def _has(mask: Mask, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


VOCABULARIES = ("qwen2_5_tokenizer", "llama3_2_tokenizer", "mistral_nemo_tokenizer", "smollm2_gguf")


@pytest.mark.parametrize("model", daily(("qwen2_5_tokenizer",), VOCABULARIES))
def test_matcher_after_random_drafts_equals_a_new_matcher_with_the_same_tokens(
    model: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(model)
    known = ModelText.open(path).tokenizer
    tokenizer = read_vocabulary(path, known.vocab_size)
    ended = 0
    formats = [*TOOL_CALL_FORMATS] if NIGHTLY else DAILY_FORMATS
    for format_name in formats:
        grammars = [
            for_tools(format_name, TOOLS, "required", parallel, token_id=known.token_id) for parallel in (True, False)
        ]
        for seed in range(WALKS):
            walk = Walk(tokenizer, grammars[seed % 2], seed)
            walk.run()
            ended += walk.matcher.ended
    assert ended > len(formats) * WALKS / 3


@pytest.mark.parametrize("format_name", daily(DAILY_FORMATS, TOOL_CALL_FORMATS))
def test_tool_call_matcher_after_random_drafts_equals_a_new_matcher(format_name: str) -> None:
    known = byte_level(sorted(TOOL_CALL_FORMATS[format_name].markers))
    for parallel in (True, False):
        grammar = for_tools(format_name, TOOLS, "required", parallel, token_id=known.token_id)
        for seed in range(10 * WALKS):
            Walk(known.tokenizer, grammar, seed).run()
