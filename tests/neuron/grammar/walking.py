"""Walks through a grammar without a model: any token that it allows may come next."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import llguidance
import numpy as np

from helexa.neuron.grammar.limits import PARSER_LIMITS
from helexa.neuron.text.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary as llguidance sees it. The first of `ends` ends the text.

    Attributes:
        spellings: the bytes of each token.
        special: tokens that stand for no text of an answer.
    """

    spellings: list[bytes]
    special: list[int]
    ends: list[int]

    @cached_property
    def tokenizer(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Wrapped(self)), n_vocab=len(self.spellings))

    @cached_property
    def closing(self) -> list[int]:
        """Tokens that end strings, lists and the like."""
        ends = {bytes([byte]) for byte in b'"}])<,\n'}
        return [index for index, spelling in enumerate(self.spellings) if spelling in ends]

    def token_id(self, text: str) -> int | None:
        """The token that is spelled so, if it is no part of plain text."""
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
    """What llguidance asks of a tokenizer."""

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
    """Bytes, and markers that are tokens."""
    spelled = [marker.encode() for marker in markers]
    ids = list(range(257, 257 + len(spelled))) if special else []
    return Vocabulary([b"<|end_of_text|>", *(bytes([byte]) for byte in range(256)), *spelled], [0, *ids], [0])


def of_model(tokenizer: Tokenizer) -> Vocabulary:
    """A real model's."""
    ids = range(tokenizer.vocab_size)
    return Vocabulary(
        [tokenizer.token_bytes(token, skip_special=False) for token in ids],
        [token for token in ids if not tokenizer.token_bytes(token)],
        sorted(tokenizer.eos_ids),
    )


def matcher(vocabulary: Vocabulary, grammar: str) -> llguidance.LLMatcher:
    limits = llguidance.LLParserLimits(**PARSER_LIMITS)
    made = llguidance.LLMatcher(vocabulary.tokenizer, grammar, limits=limits)
    assert not made.is_error(), made.get_error()
    return made


def accepts(grammar: str, text: str, vocabulary: Vocabulary | None = None) -> bool:
    """Whether `text` is one that the grammar describes as a whole, markers in it being the tokens that they are."""
    vocabulary = vocabulary or byte_level()
    made = matcher(vocabulary, grammar)
    while text:
        marker = next((marker for marker in vocabulary.markers if text.startswith(marker)), None)
        piece = marker or text[0]
        tokens = [vocabulary.markers[marker]] if marker else [byte + 1 for byte in piece.encode()]
        if made.validate_tokens(tokens) < len(tokens) or not made.consume_tokens(tokens):
            return False
        text = text.removeprefix(piece)
    return made.is_accepting()


def walk(vocabulary: Vocabulary, grammar: str, rng: random.Random, limit: int = 400) -> tuple[str, bool]:
    """Some text of a grammar, and whether it is whole; else it is cut at `limit` tokens."""
    made = matcher(vocabulary, grammar)
    tokens: list[int] = []
    while len(tokens) < limit:
        bits = np.unpackbits(np.frombuffer(made.compute_bitmask(), dtype=np.uint8), bitorder="little")
        assert not made.is_error(), made.get_error()[:2000]
        assert bits.any(), "nothing may come next"
        token = _choose(vocabulary, bits, rng, hurry=len(tokens) / limit)
        if token in vocabulary.ends:
            assert made.is_accepting()
            return vocabulary.text(tokens), True
        assert made.consume_token(token), made.get_error()[:2000]
        tokens.append(token)
    return vocabulary.text(tokens, cut=True), False


def _choose(vocabulary: Vocabulary, allowed: np.ndarray, rng: random.Random, hurry: float) -> int:
    """A token whose bit is set, more often one that ends something."""
    if (ends := _allowed(vocabulary.ends, allowed)) and rng.random() < 0.2 + hurry:
        return ends[0]
    if (markers := _allowed(vocabulary.markers.values(), allowed)) and rng.random() < 0.3:
        return rng.choice(markers)
    if (closing := _allowed(vocabulary.closing, allowed)) and rng.random() < 0.2 + hurry:
        return rng.choice(closing)
    return int(rng.choice(np.flatnonzero(allowed)))


def _allowed(tokens: Iterable[int], allowed: np.ndarray) -> list[int]:
    return [token for token in tokens if allowed[token]]
