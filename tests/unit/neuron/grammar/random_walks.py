"""Random walks through a grammar without a model: each step picks a token that the grammar allows."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import llguidance
import numpy as np

from helexa.neuron.grammar.grammar_check_and_rejection import PARSER_LIMITS
from helexa.neuron.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary as llguidance sees it. The first of `ends` ends the text.

    Attributes:
        spellings: The bytes of each token.
        special: Ids of tokens that are not text.
        ends: Ids of the end-of-sequence tokens.
    """

    spellings: list[bytes]
    special: list[int]
    ends: list[int]

    @cached_property
    def tokenizer(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Wrapped(self)), n_vocab=len(self.spellings))

    @cached_property
    def closing(self) -> list[int]:
        """Ids of tokens that end strings, lists and the like."""
        ends = {bytes([byte]) for byte in b'"}])<,\n'}
        return [index for index, spelling in enumerate(self.spellings) if spelling in ends]

    def token_id(self, text: str) -> int | None:
        """Return the id of the marker token `text`, or None if the vocabulary has no such marker."""
        return self.markers.get(text)

    @cached_property
    def markers(self) -> dict[str, int]:
        start = 257 if len(self.spellings) < 1000 else 0
        return {
            spelling.decode(): index
            for index, spelling in enumerate(self.spellings)
            if index >= start and (start or index in self.special)
        }

    def text(self, tokens: Iterable[int], *, cut: bool = False) -> str:
        return b"".join(self.spellings[token] for token in tokens).decode(errors="ignore" if cut else "strict")


class _Wrapped:
    """The tokenizer interface that llguidance expects."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.spellings
        self.special_token_ids = vocabulary.special
        self.eos_token_id = vocabulary.ends[0]
        self._bytes = {spelling: index for index, spelling in enumerate(self.tokens) if len(spelling) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        assert isinstance(text, bytes)
        return [self._bytes[bytes([byte])] for byte in text if bytes([byte]) in self._bytes]


def byte_level(markers: Iterable[str] = (), *, special: bool = True) -> Vocabulary:
    """A vocabulary of single bytes, plus `markers` as tokens of their own."""
    spelled = [marker.encode() for marker in markers]
    ids = list(range(257, 257 + len(spelled))) if special else []
    return Vocabulary([b"<|end_of_text|>", *(bytes([byte]) for byte in range(256)), *spelled], [0, *ids], [0])


def of_model(tokenizer: Tokenizer) -> Vocabulary:
    """The vocabulary of a real model."""
    ids = range(tokenizer.vocab_size)
    return Vocabulary(
        [tokenizer.token_bytes(token, skip_special=False) for token in ids],
        [token for token in ids if not tokenizer.token_bytes(token)],
        sorted(tokenizer.eos_ids),
    )


def matcher(vocabulary: Vocabulary, grammar: str) -> llguidance.LLMatcher:
    limits = llguidance.LLParserLimits(**PARSER_LIMITS)
    result = llguidance.LLMatcher(vocabulary.tokenizer, grammar, limits=limits)
    assert not result.is_error(), result.get_error()
    return result


def accepts(grammar: str, text: str, vocabulary: Vocabulary | None = None) -> bool:
    """Return whether the grammar accepts exactly `text`. Markers in it are encoded as marker tokens."""
    vocabulary = vocabulary or byte_level()
    state = matcher(vocabulary, grammar)
    while text:
        marker = next((marker for marker in vocabulary.markers if text.startswith(marker)), None)
        unit = marker or text[0]
        tokens = [vocabulary.markers[marker]] if marker else [byte + 1 for byte in unit.encode()]
        if state.validate_tokens(tokens) < len(tokens) or not state.consume_tokens(tokens):
            return False
        text = text.removeprefix(unit)
    return state.is_accepting()


def walk(vocabulary: Vocabulary, grammar: str, rng: random.Random, limit: int = 400) -> tuple[str, bool]:
    """Return a random text and whether it is complete; a text of `limit` tokens is cut off."""
    state = matcher(vocabulary, grammar)
    tokens: list[int] = []
    while len(tokens) < limit:
        bits = np.unpackbits(np.frombuffer(state.compute_bitmask(), dtype=np.uint8), bitorder="little")
        assert not state.is_error(), state.get_error()[:2000]
        assert bits.any(), "the grammar allows no token"
        token = _choose(vocabulary, bits, rng, hurry=len(tokens) / limit)
        if token in vocabulary.ends:
            assert state.is_accepting()
            return vocabulary.text(tokens), True
        assert state.consume_token(token), state.get_error()[:2000]
        tokens.append(token)
    return vocabulary.text(tokens, cut=True), False


def _choose(vocabulary: Vocabulary, allowed: np.ndarray, rng: random.Random, hurry: float) -> int:
    """Choose an allowed token at random. Tokens that end something are more likely."""
    if (ends := _allowed(vocabulary.ends, allowed)) and rng.random() < 0.2 + hurry:
        return ends[0]
    if (markers := _allowed(vocabulary.markers.values(), allowed)) and rng.random() < 0.3:
        return rng.choice(markers)
    if (closing := _allowed(vocabulary.closing, allowed)) and rng.random() < 0.2 + hurry:
        return rng.choice(closing)
    return int(rng.choice(np.flatnonzero(allowed)))


def _allowed(tokens: Iterable[int], allowed: np.ndarray) -> list[int]:
    return [token for token in tokens if allowed[token]]
