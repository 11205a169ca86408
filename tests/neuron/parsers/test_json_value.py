"""The grammar machine agrees with Python's own reader of JSON, on whole texts and on their beginnings."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helexa.neuron.parsers.json_text import argument_text, dumps, strict_loads
from helexa.neuron.parsers.json_value import MAX_DEPTH, MAX_NUMBER, JsonValue

PIECES = st.sampled_from(
    [*list('{}[]:,"\\ \n0123.-+eEuab/\x01é'), "true", "nul", "null", '"a"', '"a":', "\\u00e9", "\\n", "NaN"]
)


def accepts(text: str, size: int) -> bool:
    """Whether all of `text`, in pieces of this size, is one JSON value."""
    value, unread = JsonValue(), ""
    for start in range(0, len(text), size):
        unread += text[start : start + size]
        at, wrong = value.advance(unread, 0, False)
        unread = unread[at:]
        assert len(unread) <= 6 + size or unread[0] in "-0123456789"
        if wrong:
            return False
        if value.done:
            return not (unread + text[start + size :]).strip(" \t\r\n")
    value.advance(unread, 0, True)
    return value.done


def is_json(text: str) -> bool:
    try:
        strict_loads(text)
    except ValueError:
        return False
    return True


@settings(max_examples=400, derandomize=True)
@given(st.lists(PIECES, max_size=14).map("".join), st.integers(1, 5))
def test_what_is_accepted_is_json(text: str, size: int):
    assert accepts(text, size) == is_json(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
)


@settings(max_examples=60, derandomize=True)
@given(VALUES, st.sampled_from([None, 2]), st.booleans(), st.integers(1, 5))
def test_json_is_accepted(value: object, indent: int | None, ascii_only: bool, size: int):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert accepts(text, size)


def test_bounds():
    assert accepts("[" * MAX_DEPTH + "]" * MAX_DEPTH, 1)
    assert not accepts("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), 1)
    for size in (1, 7, MAX_NUMBER + 2):
        assert accepts("[" + "1" * MAX_NUMBER + "]", size)
        assert not accepts("[" + "1" * (MAX_NUMBER + 1) + "]", size)


@pytest.mark.parametrize(
    ("written", "schema", "text"),
    [
        ("7", {"type": "string"}, '"7"'),
        ("7", {"type": "integer"}, "7"),
        (" 7\n", {"type": "integer"}, "7"),
        ("7.5", {"type": "integer"}, '"7.5"'),
        ("7.5", {"type": "number"}, "7.5"),
        ("NaN", {"type": "number"}, '"NaN"'),
        ("true", {"type": "integer"}, '"true"'),
        ("true", {"type": "boolean"}, "true"),
        ("False", {"type": "boolean"}, "false"),
        ("yes", {"type": "boolean"}, '"yes"'),
        ("null", {"type": ["string", "null"]}, "null"),
        ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null"),
        ("3", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, '"3"'),
        ("[1, 2", {"type": "array"}, '"[1, 2"'),
        ("[1,2]", {"type": "array"}, "[1,2]"),
        ("[1,2]", {"type": "object"}, '"[1,2]"'),
        ('{"a": [1]}', {}, '{"a": [1]}'),
        ("True", {}, '"True"'),
        ("1", {"enum": ["1", "2"]}, '"1"'),
        ("1" * 5000, {}, f'"{"1" * 5000}"'),
        ("[" * 100_000, {}, f'"{"[" * 100_000}"'),
        ("é\n", {}, '"é\\n"'),
        ("1", {"type": 5, "anyOf": "x", "enum": []}, "1"),
    ],
)
def test_bare_values_are_typed_by_the_schema(written: str, schema: dict[str, object], text: str):
    assert argument_text(written, schema) == text


def test_half_characters_stay_escaped():
    assert dumps(["é", "\ud800"]) == '["\\u00e9", "\\ud800"]'
