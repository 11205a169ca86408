"""`JsonValue` accepts the same texts as Python's `json` module, except for raw line breaks and tabs in strings."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helexa.neuron.parsers.source import Source
from helexa.neuron.parsers.values.json_text import argument_text, dumps, strict_loads
from helexa.neuron.parsers.values.json_value import MAX_DEPTH, MAX_NUMBER, JsonValue, read_json

PIECES = st.sampled_from(
    [*list('{}[]:,"\\ \n0123.-+eEuab/\x01é'), "true", "nul", "null", '"a"', '"a":', "\\u00e9", "\\n", "NaN"]
)


def accepts(text: str, size: int) -> bool:
    """Return whether `text`, passed in pieces of `size` characters, is exactly one JSON value."""
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


def read_in_pieces(text: str, size: int) -> str:
    """Return the JSON value that `read_json` reads from `text` in pieces of `size` characters."""
    source, pieces = Source(), list[str]()
    reading = read_json(source, pieces.append)
    for start in range(0, len(text), size):
        source.feed(text[start : start + size])
        next(reading, None)
    return "".join(pieces)


def loaded(text: str) -> tuple[object] | None:
    """Return the value of a JSON text in a tuple, or None if it is invalid.

    Strings may contain raw line breaks and tabs.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=reject)
    except ValueError:
        return None
    return None if "\x01" in text else (value,)


def reject(constant: str) -> None:
    raise ValueError(constant)


@settings(max_examples=400, derandomize=True)
@given(st.lists(PIECES, max_size=14).map("".join), st.integers(1, 5))
def test_accepted_text_is_json_or_json_with_raw_line_breaks(text: str, size: int):
    value = loaded(text)
    assert accepts(text, size) == (value is not None)
    if value is not None and text.strip()[0] in '{["':
        assert strict_loads(read_in_pieces(text, size)) == value[0]


def test_line_breaks_and_tabs_in_strings_are_escaped():
    for size in (1, 2, 99):
        assert read_in_pieces('{\n\t"a\n": ["\tb\r\n\\n"]\r\n}', size) == '{\n\t"a\\n": ["\\tb\\r\\n\\n"]\r\n}'
    assert not accepts('"\x01"', 1)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
)


@settings(max_examples=60, derandomize=True)
@given(VALUES, st.sampled_from([None, 2]), st.booleans(), st.integers(1, 5))
def test_valid_json_is_accepted(value: object, indent: int | None, ascii_only: bool, size: int):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert accepts(text, size)


def test_depth_and_number_length_are_bounded():
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
        ("1", {"const": "1"}, '"1"'),
        ("True", {"const": True}, "true"),
        ("1", {"enum": ["1", 1]}, "1"),
        ("1", {"allOf": [{"type": "string"}, {"minLength": 1}]}, '"1"'),
        ("null", {"type": ["string", "null"], "allOf": [{"type": "string"}]}, '"null"'),
        ("1", {"$ref": "#/$defs/S", "$defs": {"S": {"type": "string"}}}, '"1"'),
        ("1", {"$ref": "#/definitions/a~1b/c", "definitions": {"a/b": {"c": {"type": "string"}}}}, '"1"'),
        ("None", {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}], "$defs": {"N": {"type": "integer"}}}, "null"),
        ("1", {"$ref": "#/$defs/L", "$defs": {"L": {"$ref": "#/$defs/L"}}}, "1"),
        ("1", {"$ref": "#/$defs/L", "$defs": {"L": {"anyOf": [{"$ref": "#/$defs/L"}, {"type": "string"}]}}}, '"1"'),
        ("1", {"$ref": "https://example.com/s.json"}, "1"),
        ("1", {"$ref": "#", "allOf": "x", "$defs": 3}, "1"),
    ],
)
def test_bare_value_gets_a_type_of_the_schema(written: str, schema: dict[str, object], text: str):
    assert argument_text(written, schema) == text


def test_lone_surrogates_stay_escaped():
    assert dumps(["é", "\ud800"]) == '["\\u00e9", "\\ud800"]'
