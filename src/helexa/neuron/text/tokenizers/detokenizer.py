"""Token ids to text while they are generated."""

import codecs
from collections.abc import Mapping, Sequence

from helexa.neuron.text.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """Turns one sequence's tokens into text, a few at a time.

    Characters whose bytes are spread over tokens are held back until they are whole; bytes that can no longer become
    a character read as U+FFFD. Control tokens have no text.

    Args:
        shown: control tokens that have text nevertheless: the bytes that stand for each.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Mapping[int, bytes] | None = None) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._shown = shown or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens; return the text they complete."""
        spell, shown = self._token_bytes, self._shown
        return self._decoder.decode(b"".join([shown.get(token_id) or spell(token_id) for token_id in ids]))

    def flush(self) -> str:
        """The end of the text: an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
