"""Incremental detokenization of generated tokens."""

import codecs
from collections.abc import Mapping, Sequence

from helexa.neuron.text.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """Incrementally converts the generated tokens of one sequence to text.

    Incomplete UTF-8 characters are held back until they are complete. Bytes that cannot become a character yield
    U+FFFD. Control tokens have no text, except those in `shown`.

    Args:
        shown: control tokens that are included in the text, with the bytes of each token.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Mapping[int, bytes] | None = None) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._shown = shown or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; return the text that is complete with these tokens."""
        spell, shown = self._token_bytes, self._shown
        return self._decoder.decode(b"".join([shown.get(token_id) or spell(token_id) for token_id in ids]))

    def flush(self) -> str:
        """Return the remaining text at the end of the sequence; an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
