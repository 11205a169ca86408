"""Parse one JSON value in streamed text, and repair the mistakes of models."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from helexa.neuron.parsers.argument_values import MAX_BARE, bare_value
from helexa.neuron.parsers.json_schema import child_schema
from helexa.neuron.parsers.json_string import JsonString
from helexa.neuron.parsers.source import NO_MARKERS, Markers, NotACall, Reading, Source

MAX_DEPTH = 100

_MAX_GAP = 256  # maximum length of white space that is held back after a comma
_SPACE = re.compile(r"[ \t\n\r]*")
_BARE_KEY = re.compile(r"[A-Za-z_$][\w$.-]*")
_MAX_KEY = 128
# Pattern of the text after a value without quotation marks: a comma, a bracket, a line break, or the next key if the
# comma before the key is missing.
_BARE_END = r'[,}\]\n]|[ \t]+(?="[^"\\\n,}\]]*"[ \t]*:)'

# Parser states: the next expected token.
_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY, _COLON, _AFTER_VALUE = range(6)


class _Container:
    """An object or array whose closing bracket was not parsed yet."""

    def __init__(self, end: str, schema: Mapping[str, Any]) -> None:
        self.end = end  # the closing bracket
        self.schema = schema  # JSON Schema of the container; empty if it is unknown
        self.key = ""  # the last key of the object
        self.doubled = False  # whether the object began with two braces, as in the templates of some models


class JsonValue:
    """State machine that finds the end of one JSON value and repairs the value.

    Valid JSON of allowed types, with up to `MAX_DEPTH` levels, stays unchanged. The state machine repairs mistakes with
    one obvious meaning: invalid escapes, raw control characters and unescaped quotation marks in strings, single
    quotation marks, missing, surplus and trailing commas, missing brackets, doubled braces, keys and words without
    quotation marks, and Python's literals.

    Args:
        schema: JSON Schema of the value. A value whose type the schema forbids is converted if its text has an allowed
            type: `5.0` to `5`, `"5"` to `5`.
        ends: markers that end the value even if brackets are open.
    """

    def __init__(self, schema: Mapping[str, Any] | None = None, ends: Markers = NO_MARKERS) -> None:
        self.done = False  # whether the value is complete
        self.failed = False  # whether the text cannot be repaired
        self.repairs: set[str] = set()  # names of the mistakes that were repaired
        self._ends = ends
        self._bare_end = re.compile("|".join([_BARE_END, *map(re.escape, ends.strings)]))
        self._root = schema or {}
        self._open: list[_Container] = []
        self._state = _VALUE
        self._string: JsonString | None = None
        self._gap = ""  # a comma and white space, which are dropped if a closing bracket follows
        self._skips_brace = False  # the second brace of a doubled pair may follow
        self._out: list[str] = []

    def take_output(self) -> str:
        """Return the JSON text since the last call of this method."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def advance(self, text: str, at: int, ended: bool) -> int:
        """Parse `text` from position `at`. Return the end of the parsed text.

        Afterwards, `done` or `failed` is true if the value is complete or cannot be repaired. Otherwise, the caller
        must pass the remaining text again, together with the text that follows. The remaining text is shorter than
        about 400 characters, because the state machine looks only so far ahead. `ended` means that no text follows.
        """
        while not (self.done or self.failed):
            if self._string is not None:
                step = self._in_string(self._string, text, at, ended)
            else:
                step = self._token(text, at, ended)
            if step is None:
                return at
            at = step
        return at

    def _in_string(self, string: JsonString, text: str, at: int, ended: bool) -> int | None:
        end = string.advance(text, at, ended)
        if string.ended:
            self.repairs |= string.repairs
            self._string = None
            if string.is_key:
                self._open[-1].key = string.value()
                self._state = _COLON
            else:
                self._value_ends()
            return end
        if ended:
            self.failed = True  # the output ended inside the string, and the missing part is unknown
        return None if end == at else end

    def _token(self, text: str, at: int, ended: bool) -> int | None:
        end = _SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess] - matches anything
        if end > at:
            self._space(text[at:end])
            return end
        if at == len(text):
            if not ended:
                return None
            self.failed = True  # the output ended inside the value, and the missing part is unknown
            return at
        if (marker := self._ends.at(text, at, ended)) is None:
            return None
        # The end marker of the call comes while brackets are open. If the value is complete except for its closing
        # brackets, the brackets are added.
        if marker and self._open:
            self._finish(complete=self._state in (_AFTER_VALUE, _FIRST_KEY, _FIRST_ITEM, _KEY))
            return at
        char = text[at]
        if self._state in (_FIRST_KEY, _KEY):
            return self._key(text, at, char, ended)
        if self._state == _COLON:
            return self._colon(at, char)
        if self._state == _AFTER_VALUE:
            return self._after_value(at, char)
        return self._value(text, at, char, ended)

    def _space(self, space: str) -> None:
        if not self._gap:
            self._out.append(space)
        elif len(self._gap) < _MAX_GAP:
            self._gap += space

    def _key(self, text: str, at: int, char: str, ended: bool) -> int | None:
        if char in "}]":
            return self._close(at, char)
        if char == ",":
            self.repairs.add("comma")
            return at + 1
        # Some templates show calls with doubled braces.
        if char == "{" and self._state == _FIRST_KEY and not self._open[-1].doubled:
            self._open[-1].doubled = True
            self.repairs.add("doubled_brace")
            return at + 1
        if char in "\"'":
            self._begin_string(char, is_key=True)
            return at + 1
        if not (bare := _BARE_KEY.match(text, at)) or bare.end() - at > _MAX_KEY:
            self.failed = True
            return at
        # The key may continue in the next chunk.
        if bare.end() == len(text) and not ended:
            return None
        self._open[-1].key = bare.group()
        self._put(f'"{bare.group()}"')
        self.repairs.add("bare_key")
        self._state = _COLON
        return bare.end()

    def _colon(self, at: int, char: str) -> int:
        if char == ":":
            self._put(":")
            self._state = _VALUE
            return at + 1
        if char in "\"'{[":
            self._put(": ")
            self.repairs.add("colon")
            self._state = _VALUE
        else:
            self.failed = True  # a key without a value
        return at

    def _after_value(self, at: int, char: str) -> int:
        skips_brace, self._skips_brace = self._skips_brace, False
        # The object began with two braces, so its end has two.
        if skips_brace and char == "}":
            return at + 1
        if char in "}]":
            return self._close(at, char)
        in_object = self._open[-1].end == "}"
        # The comma is held back, because it is surplus if a closing bracket follows.
        if char == ",":
            self._gap = ","
            self._state = _KEY if in_object else _VALUE
            return at + 1
        # The next key or item follows without a comma.
        if (char in "\"'" or char.isidentifier()) if in_object else char in "\"'{[":
            self._gap = ", "
            self.repairs.add("comma")
            self._state = _KEY if in_object else _VALUE
        else:
            self.failed = True
        return at

    def _value(self, text: str, at: int, char: str, ended: bool) -> int | None:
        if char == "]" and self._open and self._open[-1].end == "]":
            return self._close(at, char)
        if char == "," and self._gap:
            self.repairs.add("comma")
            return at + 1
        if char in "\"'":
            self._begin_string(char, is_key=False)
            return at + 1
        if char in "{[":
            if len(self._open) == MAX_DEPTH:
                self.failed = True
                return at
            schema = self._schema()
            self._put(char)
            self._open.append(_Container("}" if char == "{" else "]", schema))
            self._state = _FIRST_KEY if char == "{" else _FIRST_ITEM
            return at + 1
        # A word without quotation marks is complete only at a comma, bracket or line break.
        end = self._end_of_bare(text, at)
        if end is None and not ended and len(text) - at <= MAX_BARE:
            return None
        word = text[at:end].rstrip()
        # If the output ends within an object or list, the last word may be incomplete, and is not accepted.
        value = None if end is None and self._open else bare_value(word, self._schema())
        if value is None:
            self.failed = True
            return at
        json_text, repair = value
        if repair:
            self.repairs.add(repair)
        self._put(json_text)
        self._value_ends()
        return at + len(word)

    def _end_of_bare(self, text: str, at: int) -> int | None:
        """Return the end of a value without quotation marks; None if it is not in `text`."""
        end = at
        while match := self._bare_end.search(text, end):
            # A comma in parentheses is a part of the value, as in `f(a, b)`.
            if text.count("(", at, match.start()) <= text.count(")", at, match.start()):
                return match.start()
            end = match.end()
            if end - at > MAX_BARE:
                return end
        return None

    def _begin_string(self, quote: str, *, is_key: bool) -> None:
        self._put("")
        if quote == "'":
            self.repairs.add("single_quotes")
        schema: Mapping[str, Any] = {} if is_key else self._schema()
        in_array = bool(self._open) and self._open[-1].end == "]"
        self._string = JsonString(
            quote, self._out, self._ends, schema, is_key=is_key, in_array=in_array, depth=max(1, len(self._open))
        )

    def _schema(self) -> Mapping[str, Any]:
        """Return the JSON Schema of the next value; empty if it is unknown."""
        if not self._open or not self._root:
            return self._root
        container = self._open[-1]
        return child_schema(container.schema, None if container.end == "]" else container.key, self._root)

    def _put(self, text: str) -> None:
        self._out += (self._gap, text)
        self._gap = ""

    def _close(self, at: int, bracket: str) -> int:
        if self._gap:
            self._gap = ""
            self.repairs.add("comma")
        if self._open[-1].end != bracket:
            self.repairs.add("bracket")
            # A closing bracket without an opening bracket is dropped.
            if not any(container.end == bracket for container in self._open):
                self._state = _AFTER_VALUE
                return at + 1
            # The closing brackets of the containers inside are missing.
            while self._open[-1].end != bracket:
                self._out.append(self._open.pop().end)
        self._out.append(bracket)
        self._skips_brace = self._open.pop().doubled
        self._value_ends()
        return at + 1

    def _finish(self, *, complete: bool) -> None:
        """End the value at an end marker: close open brackets, or fail if not `complete`."""
        self.failed = not complete
        if complete:
            self._gap = ""
            while self._open:
                self._out.append(self._open.pop().end)
            self.repairs.add("bracket")
            self.done = True

    def _value_ends(self) -> None:
        self.done = not self._open
        self._state = _AFTER_VALUE


def read_json(
    source: Source,
    sink: Callable[[str], None],
    *,
    schema: Mapping[str, Any] | None = None,
    ends: Markers = NO_MARKERS,
) -> Reading[set[str]]:
    """Parse one JSON value and pass its repaired text to `sink` as it arrives.

    Returns:
        The names of the mistakes that were repaired, as in `JsonValue`.

    Raises:
        NotACall: the text cannot be repaired, or the output ended before the end of the value.
    """
    value = JsonValue(schema, ends)
    while True:
        end = value.advance(source.text, source.at, source.ended)
        if end > source.at:
            source.take(end)
        if text := value.take_output():
            sink(text)
        if value.done:
            return value.repairs
        if value.failed or source.ended:
            raise NotACall
        yield


def read_json_text(source: Source, *, ends: Markers = NO_MARKERS) -> Reading[str]:
    """Parse one JSON value and return its text, after the same repairs as `read_json`.

    Raises:
        NotACall: the text cannot be repaired, or the output ended before the end of the value.
    """
    pieces: list[str] = []
    yield from read_json(source, pieces.append, ends=ends)
    return "".join(pieces)


def repaired_json(text: str, schema: Mapping[str, Any] | None = None) -> str:
    """Return the one JSON value in `text`, after the same repairs as `read_json`.

    Raises:
        NotACall: the text cannot be repaired, or is not exactly one value.
    """
    value = JsonValue(schema)
    end = value.advance(text, 0, True)
    if not value.done or text[end:].strip():
        raise NotACall
    return value.take_output()
