"""Incremental detokenization of generated tokens."""

import codecs
from collections.abc import Mapping, Sequence

from helexa.neuron.text.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """Converts the generated tokens of one sequence to text incrementally.

    The bytes of an incomplete UTF-8 character are held back until the character is complete. Invalid bytes become
    U+FFFD. Control tokens have no text, except those in `shown`.

    Args:
        shown: ids of the control tokens that are included in the text, with the bytes of each token.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Mapping[int, bytes] | None = None) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._shown = shown or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Add the generated tokens `ids` and return the text that is now complete and was not returned before."""
        spell, shown = self._token_bytes, self._shown
        return self._decoder.decode(b"".join([shown.get(token_id) or spell(token_id) for token_id in ids]))

    def flush(self) -> str:
        """Return the text that was held back, at the end of the sequence. An incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
