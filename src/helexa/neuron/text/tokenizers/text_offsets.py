"""Find the position of each token in the text of a sequence of tokens."""

import codecs


class TextOffsets:
    """Finds the positions of tokens in their text, which is decoded as UTF-8. Invalid bytes become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def push(self, token: bytes) -> int:
        """Add the bytes of the next token. Return the index in the text of the character that it begins or continues.

        A token without bytes has the index of the next character.
        """
        incomplete, _ = self._decoder.getstate()
        offset = self._characters
        if incomplete and token and not 0x80 <= token[0] < 0xC0:
            offset += 1  # the token does not continue the incomplete character, which becomes U+FFFD
        self._characters += len(self._decoder.decode(token))
        return offset

    def end_text(self) -> None:
        """End the text. An incomplete character becomes U+FFFD."""
        self._characters += len(self._decoder.decode(b"", final=True))
