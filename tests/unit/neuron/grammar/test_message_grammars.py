"""Texts that grammars of whole messages accept."""

from typing import Any

import pytest

from helexa.core.errors import ApiError
from helexa.neuron.grammar import for_choice, for_lark, for_regex, for_schema
from helexa.neuron.grammar.schema_adaptation import MAX_DEPTH
from neuron.grammar.random_walks import accepts, byte_level

CITY = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


def nested_items(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("grammar", "text", "expected"),
    [
        (for_schema(CITY), '{"city":"Paris","days":3}', True),
        (for_schema(CITY), '{"city":"Paris","more":[1]}', True),
        (for_schema(CITY), '{"days":3}', False),
        (for_schema(CITY), '{"city": "Paris"}', False),
        (for_schema(CITY), '\n{"city":"Paris"}', False),
        (for_schema({"type": "object"}), '{"a":[{"b":null}]}', True),
        (for_schema({"type": "object"}), "[1]", False),
        (for_schema(True), "[1]", True),
        (for_schema({"x-guidance": {"whitespace_flexible": True}}), "[1, 2]", False),
        (for_regex(r"\d{3}/[a-z]+"), "123/ab", True),
        (for_regex(r"\d{3}/[a-z]+"), "123/", False),
        (for_regex(r"^a\/b$"), "a/b", True),
        (for_regex("^a|b$"), "ax", False),
        (for_regex("^a|b$"), "b", True),
        (for_regex(r"a\$"), "a$", True),
        (for_regex(r"a\$"), "a", False),
        (for_regex("a\nb"), "a\nb", True),
        (for_choice(["yes", "no"]), "yes", True),
        (for_choice(["yes", "no"]), "ye", False),
        (for_choice(['"ü"\n\\', "/"]), '"ü"\n\\', True),
        (for_lark('start: "a" x*  // <x>\nx: /b\\/</ | "<"'), "ab/<<", True),
        (for_lark('start: "a" %json {"type": "integer"}'), "a12", True),
    ],
)
def test_grammar_of_a_schema_regex_or_choice_accepts_exactly_the_valid_texts(grammar: str, text: str, expected: bool):
    assert accepts(grammar, text) == expected


@pytest.mark.parametrize(
    ("build", "code", "message"),
    [
        (lambda: for_schema([]), "invalid_schema", "must be an object"),
        (lambda: for_schema(False), "invalid_schema", "must be an object"),
        (lambda: for_schema(nested_items(MAX_DEPTH + 1)), "invalid_schema", "more than 100 levels; nest it less"),
        (lambda: for_choice([]), "invalid_grammar", "at least one choice"),
        (lambda: for_choice(["a", ""]), "invalid_grammar", "no choice may be an empty string"),
        (lambda: for_lark('root ::= "a"'), "invalid_grammar", "Lark"),
        (lambda: for_lark('start: "a" <|im_start|>'), "invalid_grammar", "special tokens"),
        (lambda: for_lark("start: <[5]>"), "invalid_grammar", "special tokens"),
    ],
)
def test_invalid_grammar_is_rejected(build, code: str, message: str):
    with pytest.raises(ApiError, match=message) as error:
        build()
    assert (error.value.status, error.value.code) == (400, code)


def test_schema_with_the_maximum_number_of_levels_is_accepted():
    assert "json_schema" in for_schema(nested_items(MAX_DEPTH))


def test_json_strings_of_a_grammar_cannot_contain_special_tokens():
    assert not accepts(for_schema({"type": "string"}), '"<|im_end|>"', byte_level(["<|im_end|>"]))
