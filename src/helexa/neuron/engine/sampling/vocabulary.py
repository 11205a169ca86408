"""Reads a model's vocabulary in the form that grammars need: the bytes of every token."""

from collections.abc import Callable
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

from helexa.core.errors import HelexaError

_MARKER = 0xFF  # llguidance marks special tokens with this byte, which UTF-8 never contains
_MAX_TOKEN = 250  # bytes; llguidance cannot represent much longer tokens


class _Vocabulary:
    """A model's vocabulary with the tokenizer interface that llguidance requires.

    The vocabulary has a token for each byte, as llguidance requires. Bytes without a token in the model's vocabulary
    get ids after the ids of the logits, so the engine never samples these tokens.

    Attributes:
        greedy: function that returns the longest tokens of a text, from left to right.
    """

    def __init__(self, model: Path, width: int) -> None:
        from helexa.neuron.text.model_text import ModelText  # slow import that most engines never need

        tokenizer = ModelText.open(model).tokenizer
        self._tokenizer = tokenizer
        tokens = (tokenizer.token_bytes(token, skip_special=False) for token in range(width))
        self.tokens = [token if len(token) <= _MAX_TOKEN else b"" for token in tokens]
        self.ends = sorted(end for end in tokenizer.eos_ids if end < width)
        special = {token for token in range(width) if self.tokens[token] and not tokenizer.token_bytes(token)}
        special.update(self.ends)  # an end token never occurs in text, even if it has the bytes of a text
        self.special_token_ids = sorted(special)
        self._special = special
        if not self.ends:
            raise HelexaError("the model's vocabulary has no token that ends an answer, which a grammar needs")
        self.eos_token_id = self.ends[0]
        # llguidance takes this token for a special token. A wrong configuration may name a token of the text.
        self.bos_token_id = tokenizer.bos_id if tokenizer.bos_id in special else None
        spelled = {self.tokens[token] for token in range(width) if token not in special}
        missing = [byte for byte in map(_byte, range(_MARKER)) if byte not in spelled]
        if missing:
            self.tokens += [b""] * (-width % 8) + missing  # so that no byte of a mask contains both kinds of tokens
        self.greedy: Callable[[str], list[int]] = lambda _: []

    def __call__(self, encoded: bytes) -> list[int]:
        """Return the tokens of a text that an output contains. Their bytes must be those of the text."""
        text = encoded.decode("utf-8", "replace")
        ids = self._tokenizer.encode(text, parse_special=False, continues=True)
        spelled = [self._tokenizer.token_bytes(token) for token in ids]
        # Tokenizers may also change the text: for example, Qwen's tokenizer composes accents.
        is_exact = b"".join(spelled) == encoded and all(len(token) <= _MAX_TOKEN for token in spelled)
        if not is_exact or not self._special.isdisjoint(ids):
            return self.greedy(text)
        return ids


def read_vocabulary(model: Path, width: int) -> LLTokenizer:
    """Return the vocabulary of the model in `model`, a file or folder, as a tokenizer for llguidance.

    Args:
        width: number of logits per row. The vocabulary is padded to this number of tokens. It may have more tokens, for
            bytes that the model has no token for.

    Raises:
        HelexaError: the vocabulary is missing, or has no end token.
    """
    vocabulary = _Vocabulary(model, width)
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=width, eos_token=vocabulary.ends)
    vocabulary.tokens.clear()  # the tokenizer has a copy
    vocabulary.greedy = tokenizer.greedy_tokenize
    return tokenizer


def _byte(value: int) -> bytes:
    return bytes((value,))
