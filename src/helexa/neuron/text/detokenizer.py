"""Token ids to text while they are generated."""

import codecs
from collections.abc import Sequence

from helexa.neuron.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one sequence's tokens into text, a few at a time.

    Characters whose bytes are spread over tokens are held back until they are whole; bytes that can no longer become
    a character read as U+FFFD. Control tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens; return the text they complete."""
        return self._decoder.decode(b"".join([self._token_bytes(token_id) for token_id in ids]))

    def flush(self) -> str:
        """The end of the text: an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
