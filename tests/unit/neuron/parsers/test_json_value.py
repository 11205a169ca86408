"""`JsonValue` leaves valid JSON unchanged, and converts JSON with small mistakes to valid JSON."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helexa.neuron.parsers.argument_values import MAX_BARE, argument_text, dumps, strict_loads
from helexa.neuron.parsers.json_value_and_repair import MAX_DEPTH, JsonValue, read_json, repaired_json
from helexa.neuron.parsers.source import Markers, NotACall, Source
from nightly import cases

CASES = cases(400, 20_000)
PIECES = st.sampled_from(
    [
        *list("{}[]:,\"\\ \n0123.-+eEuab/\x01é'`"),
        "true",
        "nul",
        "null",
        '"a"',
        '"a":',
        "\\u00e9",
        "\\n",
        "NaN",
        '", "b": "',
        '"""',
    ]
)


def repaired(text: str, size: int = 1, schema: dict[str, object] | None = None) -> str | None:
    """Return the JSON text that `JsonValue` makes of `text` in pieces of `size` characters; None if it fails."""
    value, unread, json_text = JsonValue(schema), "", ""
    for start in range(0, len(text), size):
        unread += text[start : start + size]
        at = value.advance(unread, 0, False)
        unread = unread[at:]
        json_text += value.take_output()
        assert len(unread) <= MAX_BARE + 50 + size
        if value.done:
            return json_text if not (unread + text[start + size :]).strip(" \t\r\n") else None
        if value.failed:
            return None
    value.advance(unread, 0, True)
    return json_text + value.take_output() if value.done else None


def read_in_pieces(text: str, size: int) -> str:
    """Return the JSON value that `read_json` reads from `text` in pieces of `size` characters."""
    source, pieces = Source(), list[str]()
    reading = read_json(source, pieces.append)
    for start in range(0, len(text), size):
        source.feed(text[start : start + size])
        next(reading, None)
    source.feed("")
    source.ended = True
    next(reading, None)
    return "".join(pieces)


@settings(max_examples=CASES, derandomize=True)
@given(st.lists(PIECES, max_size=14).map("".join), st.integers(1, 5))
def test_repaired_json_arguments_are_valid_and_independent_of_chunk_boundaries(text: str, size: int):
    text = "{" + text
    result = repaired(text, size)
    assert result == repaired(text, 1) == repaired(text, len(text))
    if result is not None:
        assert isinstance(strict_loads(result), dict)
    try:
        valid = json.loads(text, strict=False, parse_constant=reject)
    except ValueError:
        return
    if '"""' not in text:
        assert result is not None and strict_loads(result) == valid


def reject(constant: str) -> None:
    raise ValueError(constant)


def test_line_breaks_and_tabs_in_json_strings_are_escaped():
    for size in (1, 2, 99):
        assert read_in_pieces('{\n\t"a\n": ["\tb\r\n\\n"]\r\n}', size) == '{\n\t"a\\n": ["\\tb\\r\\n\\n"]\r\n}'


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r'{"p": "C:\Users\me\new"}', {"p": "C:\\Users\\me\\new"}),
        (r'{"p": "C:\\Users\\me\\new"}', {"p": "C:\\Users\\me\\new"}),
        (r'{"p": "C:\Users\me\"}', {"p": "C:\\Users\\me\\"}),
        (r'{"p": "src\main\test.py", "q": 1}', {"p": "src\\main\\test.py", "q": 1}),
        (r'{"p": "^\w+\s\b$"}', {"p": r"^\w+\s\b$"}),
        (r'{"p": "r\'\d+\'\nprint(1)"}', {"p": "r'\\d+'\nprint(1)"}),
        (r'{"p": "it\'s \x41 \u12 \$"}', {"p": "it's \\x41 \\u12 \\$"}),
        ('{"p": "a \\\n b"}', {"p": "a \\\n b"}),
        ('{"p": "\x00\x1f"}', {"p": "\x00\x1f"}),
        ('{"p": "say "hi" to", "q": ""}', {"p": 'say "hi" to', "q": ""}),
        ('{"p": "f("a", "b")", "q": [1]}', {"p": 'f("a", "b")', "q": [1]}),
        ('{"p": "{"a": "b"}"}', {"p": '{"a": "b"}'}),
        ('{"p": ["say "hi"", "x"]}', {"p": ['say "hi"', "x"]}),
        ('{"p": """a "b"\nc""", "q": 1}', {"p": 'a "b"\nc', "q": 1}),
        ("{'p': 'it's \"x\"', q: 'y'}", {"p": 'it\'s "x"', "q": "y"}),
        ('{"p": True, "q": None, "r": NaN, "s": -Infinity}', {"p": True, "q": None, "r": None, "s": None}),
        ('{"p": [1, 2,], "q": {"r": 1,},}', {"p": [1, 2], "q": {"r": 1}}),
        ('{"p": 1,, "q": 2}', {"p": 1, "q": 2}),
        ('{"p": 1 "q": 2\n"r": "x" "s": 3}', {"p": 1, "q": 2, "r": "x", "s": 3}),
        ('{{"p": {{"q": 1}}, "r": 2}', {"p": {"q": 1}, "r": 2}),
        ('{"p": [1, {"q": 2], "r": 3}', {"p": [1, {"q": 2}], "r": 3}),
        (
            '{"p": 007, "q": +5, "r": .5, "s": 5., "t": New York}',
            {"p": "007", "q": 5, "r": 0.5, "s": 5, "t": "New York"},
        ),
        ('{"p": open("x, y"), "q": 1}', {"p": 'open("x, y")', "q": 1}),
        (r'{"p": E:\My Files\a.md, "q": 1}', {"p": "E:\\My Files\\a.md", "q": 1}),
    ],
)
def test_small_mistakes_in_json_arguments_are_repaired(written: str, value: object):
    for size in (1, 2, 5, len(written)):
        text = repaired(written, size)
        assert text is not None and strict_loads(text) == value
    assert strict_loads(repaired_json(written)) == value


@pytest.mark.parametrize(
    "text",
    [
        '{"p": "x',
        '{"p": "x"',
        '{"p": 5',
        '{"p": ',
        '{"p": 1,',
        '{"p"',
        '{"p", "q": 1}',
        '{"p": tru',
        '{"p": "x\\',
        '{"p": }',
        '{"p": [1] ?}',
    ],
)
def test_incomplete_or_ambiguous_json_is_not_repaired(text: str):
    assert repaired(text) is None
    with pytest.raises(NotACall):
        repaired_json(text)


@pytest.mark.parametrize(
    ("written", "schema", "value"),
    [
        ("5.0", {"type": "integer"}, 5),
        ("5.0", {"type": ["integer", "null"]}, 5),
        ("5.5", {"type": "integer"}, 5.5),
        ("5.0", {"type": "number"}, 5.0),
        ("5.0", {"anyOf": [{"type": "integer"}, {"type": "number"}]}, 5.0),
        ('"5"', {"type": "integer"}, 5),
        ('"5.0"', {"type": "integer"}, 5),
        ('"5"', {"type": ["integer", "string"]}, "5"),
        ('"5"', {}, "5"),
        ("5", {"type": "string"}, "5"),
        ("5.50", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "5.50"),
        ("5", {"type": ["integer", "string"]}, 5),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("true", {"type": "string"}, True),
        ("007", {}, "007"),
        ("007", {"type": "string"}, "007"),
        ("007", {"type": ["integer", "null"]}, 7),
        ("-00.50", {"type": "number"}, -0.5),
        ("+33123", {"type": "string"}, "+33123"),
        ("+33123", {"type": "integer"}, 33123),
        ("+33123", {}, 33123),
        ('"five"', {"type": "integer"}, "five"),
        ('"true"', {"type": "boolean"}, True),
        (r'"[1, \"x\"]"', {"type": "array"}, [1, "x"]),
        ("[1.0, 2]", {"type": "array", "items": {"$ref": "#/$defs/n"}}, [1, 2]),
        ('{"b": 1.0}', {"additionalProperties": {"type": "integer"}}, {"b": 1}),
        (f'"{"x" * 70_000}"', {"type": "integer"}, "x" * 70_000),
    ],
)
def test_json_values_get_the_type_of_the_schema_if_only_one_fits(
    written: str, schema: dict[str, object], value: object
):
    tool = {"properties": {"a": schema}, "$defs": {"n": {"type": "integer"}}}
    text = f'{{"a": {written}}}'
    result = repaired(text, 1 if len(text) < 1000 else 999, tool)
    assert result is not None
    [read] = strict_loads(result).values()
    assert (read, type(read)) == (value, type(value))


def test_markers_inside_json_strings_do_not_end_the_value():
    value = JsonValue(ends=Markers(["</t>"]))
    text = '{"a": "x</t>", "b": "y"</t>'
    assert value.advance(text, 0, False) == len(text) - len("</t>")
    assert value.done and strict_loads(value.take_output()) == {"a": "x</t>", "b": "y"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
)


@settings(max_examples=60, derandomize=True)
@given(VALUES, st.sampled_from([None, 2]), st.booleans(), st.integers(1, 5))
def test_valid_json_is_accepted_unchanged(value: object, indent: int | None, ascii_only: bool, size: int):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert repaired(text, size) == text


def test_json_above_the_depth_or_number_length_limit_is_not_repaired():
    assert repaired("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert repaired("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)) is None
    for size in (1, 7, MAX_BARE + 2):
        assert repaired("[" + "1" * MAX_BARE + "]", size)
        assert repaired("[" + "1" * (MAX_BARE + 1) + "]", size) is None


@pytest.mark.parametrize(
    ("written", "schema", "text"),
    [
        ("7", {"type": "string"}, '"7"'),
        ("7", {"type": "integer"}, "7"),
        (" 7\n", {"type": "integer"}, "7"),
        ("7.5", {"type": "integer"}, '"7.5"'),
        ("7.0", {"type": "integer"}, "7"),
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
def test_value_without_quotes_gets_a_type_of_the_schema(written: str, schema: dict[str, object], text: str):
    assert argument_text(written, schema) == text


def test_lone_surrogates_in_json_strings_stay_escaped():
    assert dumps(["é", "\ud800"]) == '["\\u00e9", "\\ud800"]'
