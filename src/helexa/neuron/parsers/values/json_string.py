"""Parse one JSON string in streamed text, and repair its escapes and quotation marks."""

import json
import re
from collections.abc import Mapping
from typing import Any

from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.schema_types import schema_types
from helexa.neuron.parsers.values.json_text import has_type, strict_loads, whole_number
from helexa.neuron.parsers.values.string_end import ends_string

_MAX_HELD = 1 << 16  # characters of a string that may turn out to be a number, an array or an object
_PLAIN = {quote: re.compile(rf"[^\\\x00-\x1f{quote}]*") for quote in ('"', "'\"")}
_HEX = re.compile(r"[0-9a-fA-F]*")
_BREAKS_PATH = re.compile(r"[^\w.:~-]")  # a character that ends a path with unescaped backslashes


class JsonString:
    """State machine that converts a JSON string in streamed text to a valid JSON string and finds its end.

    * An invalid escape, such as `\\w`, represents a backslash and the character. `\\'` represents the character.
    * After an invalid escape in a path such as `C:\\Users\\new`, all backslashes of the path represent themselves.
    * Raw control characters are escaped.
    * A quotation mark ends the string only if the text after it can follow the string.

    Args:
        quote: the opening quotation mark, which was already read.
        out: list to which the JSON text of the string is appended.
        ends: markers that may follow the string.
        schema: JSON Schema of the string; empty if it is unknown. If the schema forbids strings, the string is held
            back, and replaced by the JSON value that it contains if the schema allows this value.
        is_key: whether the string is a key of an object.
        in_array: whether the string is an item of an array.
        depth: number of open containers around the string.

    Attributes:
        ended: whether the end of the string was parsed.
        repairs: names of the repaired mistakes.
    """

    def __init__(
        self,
        quote: str,
        out: list[str],
        ends: Markers,
        schema: Mapping[str, Any],
        *,
        is_key: bool,
        in_array: bool,
        depth: int,
    ) -> None:
        self.ended = False
        self.repairs: set[str] = set()
        self.is_key = is_key
        self._quote = quote
        self._plain = _PLAIN[quote if quote == '"' else "'\""]
        self._out = out
        self._ends = ends
        self._schema = schema
        self._in_array = in_array
        self._depth = depth
        types = schema_types(schema) if schema else frozenset[str]()
        self._types = types if types and "string" not in types else None
        self._kept: list[str] | None = [] if is_key or self._types else None
        self._kept_length = 0
        self._empty = True
        self._triple = False
        self._had_invalid = False  # an invalid escape occurred in the string
        self._had_valid = False  # a valid escape occurred in the current path
        self._raw = False  # backslashes of the current path represent themselves
        if self._types is None:
            out.append('"')

    def value(self) -> str:
        """Return the value of a key."""
        return json.loads(f'"{"".join(self._kept or ())}"')

    def advance(self, text: str, at: int, ended: bool) -> int:
        """Parse `text` from position `at`. Return the end of the parsed text. The rest must be passed again."""
        while not self.ended:
            end = self._plain.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if end > at:
                self._add_plain(text[at:end])
                at = end
            if at == len(text):
                break
            char = text[at]
            if char == "\\":
                step = self._escape(text, at, ended)
            elif char == self._quote:
                step = self._quotation(text, at, ended)
            else:
                self._add('\\"' if char == '"' else json.dumps(char)[1:-1])
                self._raw = self._had_valid = False
                step = at + 1
            if step is None:
                break
            at = step
        return at

    def _add_plain(self, text: str) -> None:
        self._add(text)
        if (self._raw or self._had_valid) and _BREAKS_PATH.search(text):
            self._raw = self._had_valid = False

    def _add(self, text: str) -> None:
        self._empty = False
        if self._kept is not None:
            self._kept.append(text)
            self._kept_length += len(text)
            if self._types is not None:
                if self._kept_length > _MAX_HELD:
                    self._release()
                return
        self._out.append(text)

    def _release(self) -> None:
        """Pass on a string that was held back."""
        self._out += ('"', *(self._kept or ()))
        self._kept = self._types = None

    def _escape(self, text: str, at: int, ended: bool) -> int | None:
        if at + 1 == len(text):
            return None
        char = text[at + 1]
        if char == "u":
            digits = _HEX.match(text, at + 2, at + 6).end() - at - 2  # pyright: ignore[reportOptionalMemberAccess]
            if digits < 4 and at + 2 + digits == len(text) and not ended:
                return None
            if digits == 4 and not self._raw:
                self._had_valid = True
                self._add(text[at : at + 6])
                return at + 6
        elif char == '"' and self._raw and self._quote == '"':
            follows = ends_string(text, at + 2, ended, self._ends, self._depth, self._in_array)
            if follows is None:
                return None
            if not follows:
                self._add('\\"')
                return at + 2
        elif char in '"\\/' or (
            char in "bfnrt" and not (self._raw or (self._had_invalid and char in "bf"))
        ):  # regular expressions use `\b`, and no text contains a backspace
            self._had_valid = True
            self._add(text[at : at + 2])
            return at + 2
        elif char == "'":
            self.repairs.add("escape")
            self._add("'")
            return at + 2
        self.repairs.add("escape")
        self._raw = self._raw or (not self._had_valid and char.isalnum())
        self._had_invalid = True
        self._add("\\\\")
        return at + 1

    def _quotation(self, text: str, at: int, ended: bool) -> int | None:
        if self._triple or (self._empty and not self.is_key and text.startswith(self._quote, at + 1)):
            return self._triple_quotation(text, at, ended)
        if self._empty and not self.is_key and at + 1 == len(text) and not ended:
            return None
        follows = self.is_key or ends_string(text, at + 1, ended, self._ends, self._depth, self._in_array)
        if follows is None:
            return None
        if follows:
            self._end()
        else:
            self.repairs.add("quotes")
            self._raw = self._had_valid = False
            self._add('\\"' if self._quote == '"' else "'")
        return at + 1

    def _triple_quotation(self, text: str, at: int, ended: bool) -> int | None:
        """Parse a quotation mark of a string with triple quotation marks, as in Python."""
        if not self._triple:
            self._triple, self._empty = True, False
            self.repairs.add("quotes")
            return at + 2
        if text.startswith(self._quote * 3, at):
            self._end()
            return at + 3
        if len(text) - at < 3 and text[at:] == self._quote * (len(text) - at) and not ended:
            return None
        self._add('\\"' if self._quote == '"' else "'")
        return at + 1

    def _end(self) -> None:
        self.ended = True
        if self._types is None:
            self._out.append('"')
            return
        text = json.loads(f'"{"".join(self._kept or ())}"')
        try:
            number = whole_number(text.strip(), self._schema)
            value = strict_loads(number)
        except ValueError:
            value, number = text, ""
        if any(has_type(value, kind) for kind in self._types):
            self._out.append(number)
            self.repairs.add("type")
        else:
            self._out += ('"', *(self._kept or ()), '"')
