"""Parse one JSON value in streamed text."""

import re
from collections.abc import Callable

from helexa.neuron.parsers.source import NotACall, Reading, Source

MAX_DEPTH = 100
MAX_NUMBER = 400  # characters; a number is held back as a whole, because its end is visible only in the following text

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x08\x0b\x0c\x0e-\x1f]*')
_BREAKS = re.compile(r"[\t\n\r]")
_ESCAPED = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_NUMBER_RUN = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LITERALS = ("true", "false", "null")

# Parser states: the next expected token.
_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY, _COLON, _AFTER_VALUE, _STRING, _KEY_STRING = range(8)


class JsonValue:
    """State machine that validates one JSON value in streamed text and finds its end.

    Small models write raw line breaks and tabs inside strings, which JSON does not allow. The state machine accepts
    these characters, and `breaks` contains their positions.

    Attributes:
        done: whether the value is complete.
        breaks: positions of raw line breaks and tabs inside strings, in the text of the last `advance` call.
    """

    def __init__(self) -> None:
        self.done = False
        self.breaks: list[int] = []
        self._state = _VALUE
        self._open: list[str] = []  # closing brackets of open containers, innermost last

    def advance(self, text: str, at: int, ended: bool) -> tuple[int, bool]:
        """Parse `text` from position `at`. Return the end of the parsed text, and whether the text after it is invalid.

        If `text` ends inside a token, the returned position is the start of the token. The caller must pass this token
        again, together with the text that follows. Such a token has up to five characters, or up to `MAX_NUMBER`
        characters if it is a number.

        Args:
            text: the buffered text.
            at: position of the first character that was not parsed yet.
            ended: whether no more text follows.
        """
        self.breaks = []
        while not self.done:
            if self._state in (_STRING, _KEY_STRING):
                at, wait = self._in_string(text, at)
            else:
                at = _SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess] - matches anything
                if at == len(text):
                    return at, ended
                at, wait = self._token(text, at, ended)
            if wait is not None:
                return at, wait or ended
        return at, False

    def _in_string(self, text: str, at: int) -> tuple[int, bool | None]:
        start, at = at, _PLAIN.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
        self.breaks += [match.start() for match in _BREAKS.finditer(text, start, at)]
        if at == len(text):
            return at, False
        if text[at] == '"':
            if self._state == _KEY_STRING:
                self._state = _COLON
            else:
                self._value_ends()
            return at + 1, None
        if escape := _ESCAPE.match(text, at):
            return escape.end(), None
        return at, _HALF_ESCAPE.fullmatch(text, at) is None

    def _token(self, text: str, at: int, ended: bool) -> tuple[int, bool | None]:
        """Parse a token outside of strings, at position `at`. Return the token's end and None.

        If the token is incomplete, return its start and False. If the token is invalid, return its start and True.
        """
        char, state = text[at], self._state
        if state in (_FIRST_ITEM, _FIRST_KEY, _AFTER_VALUE) and self._open and char == self._open[-1]:
            self._open.pop()
            self._value_ends()
        elif state == _AFTER_VALUE and char == ",":
            self._state = _KEY if self._open[-1] == "}" else _VALUE
        elif state == _COLON and char == ":":
            self._state = _VALUE
        elif state in (_FIRST_KEY, _KEY) and char == '"':
            self._state = _KEY_STRING
        elif state in (_VALUE, _FIRST_ITEM):
            return self._value(text, at, ended)
        else:
            return at, True
        return at + 1, None

    def _value(self, text: str, at: int, ended: bool) -> tuple[int, bool | None]:
        char = text[at]
        if char == '"':
            self._state = _STRING
            return at + 1, None
        if char in "{[":
            if len(self._open) == MAX_DEPTH:
                return at, True
            self._open.append("}" if char == "{" else "]")
            self._state = _FIRST_KEY if char == "{" else _FIRST_ITEM
            return at + 1, None
        if run := _NUMBER_RUN.match(text, at):
            end = run.end()
            if end == len(text) and not ended and end - at <= MAX_NUMBER:
                return at, False
            if end - at > MAX_NUMBER or not _NUMBER.fullmatch(text, at, end):
                return at, True
            self._value_ends()
            return end, None
        for literal in _LITERALS:
            if text.startswith(literal, at):
                self._value_ends()
                return at + len(literal), None
        next_text = text[at : at + 5]
        return at, not any(literal.startswith(next_text) for literal in _LITERALS)

    def _value_ends(self) -> None:
        self.done = not self._open
        self._state = _AFTER_VALUE


def read_json(source: Source, sink: Callable[[str], None]) -> Reading[None]:
    """Parse one JSON value and pass its text to `sink` as it arrives.

    Raw line breaks and tabs in strings are escaped in the text.

    Raises:
        NotACall: the text is not valid JSON, or the output ended before the end of the value.
    """
    value = JsonValue()
    while True:
        end, wrong = value.advance(source.text, source.at, source.ended)
        if end > source.at:
            start = source.at
            sink(_escape_breaks(source.take(end), [position - start for position in value.breaks]))
        if value.done:
            return
        if wrong:
            raise NotACall
        yield


def _escape_breaks(text: str, breaks: list[int]) -> str:
    fragments: list[str] = []
    at = 0
    for position in breaks:
        fragments += [text[at:position], _ESCAPED[text[position]]]
        at = position + 1
    return "".join([*fragments, text[at:]])


def read_json_text(source: Source) -> Reading[str]:
    """Parse one JSON value and return its text.

    Raises:
        NotACall: the text is not valid JSON, or the output ended before the end of the value.
    """
    pieces: list[str] = []
    yield from read_json(source, pieces.append)
    return "".join(pieces)
