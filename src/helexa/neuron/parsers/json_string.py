"""Repair strings in JSON: escapes, and quotation marks inside the string."""

import json
import re
from collections.abc import Mapping
from typing import Any

from helexa.neuron.parsers.argument_values import has_type, strict_loads, whole_number
from helexa.neuron.parsers.json_schema import schema_types
from helexa.neuron.parsers.source import Markers

_MAX_SPACE = 200
_SPACE = re.compile(rf"[ \t\n\r]{{0,{_MAX_SPACE}}}")
_KEY = re.compile(r'"(?:[^"\\\n]|\\.){0,128}"\s{0,9}:|\'[^\'\n]{0,128}\'\s{0,9}:|[A-Za-z_$][\w$.-]{0,128}\s{0,9}:')
_PART_OF_KEY = re.compile(
    r'"(?:[^"\\\n]|\\.){0,128}(?:\\|"\s{0,9})?\Z|\'[^\'\n]{0,128}(?:\'\s{0,9})?\Z|[A-Za-z_$][\w$.-]{0,128}\s{0,9}\Z'
)
_LONG_KEY = re.compile(r'"(?:[^"\\\n]|\\.){129}')
_ITEM = re.compile(r"[\"'\[{\]0-9-]|true|false|null|True|False|None")
_PART_OF_ITEM = re.compile(r"(?:t|tr|tru|f|fa|fal|fals|n|nu|nul|T|Tr|Tru|F|Fa|Fal|Fals|N|No|Non)\Z")

_MAX_HELD = 1 << 16  # maximum length of a string that is held back, because it may turn out to be another value
_PLAIN = {quote: re.compile(rf"[^\\\x00-\x1f{quote}]*") for quote in ('"', "'\"")}
_HEX = re.compile(r"[0-9a-fA-F]*")
_BREAKS_PATH = re.compile(r"[^\w.:~-]")  # a character that ends a path with unescaped backslashes


def _ends_string(text: str, at: int, ended: bool, ends: Markers, depth: int, in_array: bool) -> bool | None:
    """Return whether the quotation mark before position `at` ends a string value.

    In valid JSON, such a quotation mark always ends the string. The result is None if more text must arrive first.

    Args:
        ends: markers that may follow the JSON text.
        depth: number of open containers around the string.
        in_array: whether the string is an item of an array.
    """
    wait = True if ended else None
    # If at least `_MAX_SPACE` characters of white space follow, the mark ends the string, because streaming must not
    # wait for the next text any longer.
    if (after_space := _skip_space(text, at)) is None:
        return True
    at = after_space
    if at == len(text):
        return wait
    if (marker := ends.at(text, at, ended)) or marker is None:
        return True if marker else None
    if text[at] in "}]":
        return _after_brackets(text, at, wait, ends, depth)
    if text[at] == ",":
        after_comma = _skip_space(text, at + 1)
        if after_comma is None:
            return True
        if after_comma == len(text):
            return wait
        if text[after_comma] in "}]":
            return True
        # An item must follow the comma. Other text belongs to the string.
        if in_array:
            return bool(_ITEM.match(text, after_comma)) or (None if _PART_OF_ITEM.match(text, after_comma) else False)
        return _is_key(text, after_comma, wait)
    # If a key follows without a comma, the mark ends the string, because a missing comma is more common than a string
    # that contains `" "word":`.
    return not in_array and text[at] == '"' and _is_key(text, at, False if ended else None)


def _is_key(text: str, at: int, wait: bool | None) -> bool | None:
    if _KEY.match(text, at) or _LONG_KEY.match(text, at):
        return True
    return wait if _PART_OF_KEY.match(text, at) else False


def _after_brackets(text: str, at: int, wait: bool | None, ends: Markers, depth: int) -> bool | None:
    """Return whether brackets at `at` end a string's containers; None if undecided."""
    brackets = 0
    while text[at] in "}]":
        brackets += 1
        after = _skip_space(text, at + 1)
        # Up to three surplus brackets are accepted.
        if after is None or brackets > depth + 3:
            return True
        if after == len(text):
            return wait
        at = after
    # A quotation mark after the brackets means that the brackets are inside the string.
    if text[at] in "\"'":
        return False
    if text[at] == "," or brackets >= depth:
        return True
    marker = ends.at(text, at, wait is True)
    return None if marker is None else bool(marker)


def _skip_space(text: str, at: int) -> int | None:
    """Return the position after white space; None if `_MAX_SPACE` characters follow."""
    end = _SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess] - matches anything
    return None if end - at == _MAX_SPACE else end


class JsonString:
    """State machine that finds the end of a JSON string and repairs it.

    * An invalid escape, such as `\\w`, represents a backslash and the character. `\\'` represents the character.
    * After an invalid escape in a path such as `C:\\Users\\new`, all backslashes of the path represent themselves.
    * Raw control characters are escaped.
    * A quotation mark ends the string only if the text after it can follow the string.
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
        self.ended = False  # whether the end of the string was parsed
        self.repairs: set[str] = set()  # names of the repaired mistakes
        self.is_key = is_key  # whether the string is a key of an object
        self._quote = quote  # the opening quotation mark, which was already read
        self._plain = _PLAIN[quote if quote == '"' else "'\""]
        self._out = out  # list to which the JSON text of the string is appended
        self._ends = ends  # markers that may follow the string
        # JSON Schema of the string; empty if it is unknown. If the schema forbids strings, the string is held back, and
        # replaced by the JSON value that it contains if the schema allows this value.
        self._schema = schema
        self._in_array = in_array  # whether the string is an item of an array
        self._depth = depth  # number of open containers around the string
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
        """Return the key, without escapes. Call this only if `is_key` and `ended`."""
        return json.loads(f'"{"".join(self._kept or ())}"')

    def advance(self, text: str, at: int, ended: bool) -> int:
        """Parse `text` from position `at`. Return the end of the parsed text.

        The caller must pass the rest of the text again, together with the text that follows.
        """
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
                # The string is too long to be held back.
                if self._kept_length > _MAX_HELD:
                    self._release()
                return
        self._out.append(text)

    def _release(self) -> None:
        """Add the string that was held back to the output."""
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
        # In a path such as `C:\dir\"`, the backslash is the last character of the path, and the quotation mark ends the
        # string.
        elif char == '"' and self._raw and self._quote == '"':
            follows = _ends_string(text, at + 2, ended, self._ends, self._depth, self._in_array)
            if follows is None:
                return None
            if not follows:
                self._add('\\"')
                return at + 2
        elif char in '"\\/' or (
            char in "bfnrt" and not (self._raw or (self._had_invalid and char in "bf"))
        ):  # after an invalid escape, `\b` is rather a part of a regular expression than a backspace
            self._had_valid = True
            self._add(text[at : at + 2])
            return at + 2
        elif char == "'":
            self.repairs.add("escape")
            self._add("'")
            return at + 2
        self.repairs.add("escape")
        # The first invalid escape in a path shows that the model has not escaped the backslashes of the path at all.
        self._raw = self._raw or (not self._had_valid and char.isalnum())
        self._had_invalid = True
        self._add("\\\\")
        return at + 1

    def _quotation(self, text: str, at: int, ended: bool) -> int | None:
        if self._triple or (self._empty and not self.is_key and text.startswith(self._quote, at + 1)):
            return self._triple_quotation(text, at, ended)
        if self._empty and not self.is_key and at + 1 == len(text) and not ended:
            return None
        follows = self.is_key or _ends_string(text, at + 1, ended, self._ends, self._depth, self._in_array)
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
        """Parse a quotation mark of a triple-quoted string; return the end, None to wait."""
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
        # The schema forbids strings, and the string contains an allowed value, such as "5".
        if any(has_type(value, kind) for kind in self._types):
            self._out.append(number)
            self.repairs.add("type")
        else:
            self._out += ('"', *(self._kept or ()), '"')
