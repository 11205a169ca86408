"""Decide whether a quotation mark in JSON ends a string, or is a part of the string that was not escaped."""

import re

from helexa.neuron.parsers.markers import Markers

_MAX_SPACE = 200
_SPACE = re.compile(rf"[ \t\n\r]{{0,{_MAX_SPACE}}}")
_KEY = re.compile(r'"(?:[^"\\\n]|\\.){0,128}"\s{0,9}:|\'[^\'\n]{0,128}\'\s{0,9}:|[A-Za-z_$][\w$.-]{0,128}\s{0,9}:')
_PART_OF_KEY = re.compile(
    r'"(?:[^"\\\n]|\\.){0,128}(?:\\|"\s{0,9})?\Z|\'[^\'\n]{0,128}(?:\'\s{0,9})?\Z|[A-Za-z_$][\w$.-]{0,128}\s{0,9}\Z'
)
_LONG_KEY = re.compile(r'"(?:[^"\\\n]|\\.){129}')
_ITEM = re.compile(r"[\"'\[{\]0-9-]|true|false|null|True|False|None")
_PART_OF_ITEM = re.compile(r"(?:t|tr|tru|f|fa|fal|fals|n|nu|nul|T|Tr|Tru|F|Fa|Fal|Fals|N|No|Non)\Z")


def ends_string(text: str, at: int, ended: bool, ends: Markers, depth: int, in_array: bool) -> bool | None:
    """Return whether the quotation mark before position `at` ends a string value.

    This is always the case if the text is valid JSON.

    Args:
        text: the buffered text.
        at: position after the quotation mark.
        ended: whether no more text follows.
        ends: markers that may follow the JSON text.
        depth: number of open containers around the string.
        in_array: whether the string is an item of an array.

    Returns:
        None if more text is needed to decide.
    """
    wait = True if ended else None
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
        if in_array:
            return bool(_ITEM.match(text, after_comma)) or (None if _PART_OF_ITEM.match(text, after_comma) else False)
        return _is_key(text, after_comma, wait)
    # A key without a comma before it. A comma is missing more often than a quotation mark is followed by `word":`.
    return not in_array and text[at] == '"' and _is_key(text, at, False if ended else None)


def _is_key(text: str, at: int, wait: bool | None) -> bool | None:
    if _KEY.match(text, at) or _LONG_KEY.match(text, at):
        return True
    return wait if _PART_OF_KEY.match(text, at) else False


def _after_brackets(text: str, at: int, wait: bool | None, ends: Markers, depth: int) -> bool | None:
    """Return whether closing brackets from position `at` end the containers around a string."""
    brackets = 0
    while text[at] in "}]":
        brackets += 1
        after = _skip_space(text, at + 1)
        if after is None or brackets > depth + 3:
            return True
        if after == len(text):
            return wait
        at = after
    if text[at] in "\"'":
        return False
    if text[at] == "," or brackets >= depth:
        return True
    marker = ends.at(text, at, wait is True)
    return None if marker is None else bool(marker)


def _skip_space(text: str, at: int) -> int | None:
    """Return the position after white space, or None if the white space is too long to look ahead."""
    end = _SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess] - matches anything
    return None if end - at == _MAX_SPACE else end
