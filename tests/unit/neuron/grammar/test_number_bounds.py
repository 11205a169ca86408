"""Grammars limit the digits of numbers, so that a number ends."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from helexa.neuron.grammar import for_schema, for_tools
from helexa.neuron.grammar.schema_adaptation import bounded

TOKENIZER = LLTokenizer("byte")
ENDLESS = ["1" * 40, "-" + "7" * 40, "0." + "3" * 40, "1." + "0" * 40]


def accepted_prefix(grammar: str, text: str) -> str:
    """Return the prefix of `text` that the grammar accepts."""
    matcher = LLMatcher(TOKENIZER, grammar)
    assert not matcher.get_error(), matcher.get_error()
    return text[: matcher.try_consume_tokens(TOKENIZER.tokenize_str(text))]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer"},
        {"type": "number"},
        {"type": ["number", "null"]},
        {"type": "number", "minimum": -5},
        {"type": "number", "exclusiveMaximum": 10**17},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "number", "minimum": -1.8e308, "exclusiveMaximum": 1.8e308},
        {"type": "integer", "multipleOf": 1},
        {"anyOf": [{"type": "string"}, {"type": "number"}]},
        {"$ref": "#/$defs/n"},
    ],
)
@pytest.mark.parametrize("text", ENDLESS)
def test_number_without_bounds_has_a_limited_number_of_digits(schema: dict[str, Any], text: str) -> None:
    defined = {"n": {"type": "number"}}
    grammar = for_schema({"type": "object", "properties": {"n": schema}, "required": ["n"], "$defs": defined})
    assert len(accepted_prefix(grammar, '{"n":' + text)) <= len('{"n":-') + 18 + 12


@pytest.mark.parametrize("format_name", ["hermes", "qwen_xml", "llama3_json", "pythonic", "mistral", "deepseek"])
def test_numbers_in_tool_arguments_have_a_limited_number_of_digits(format_name: str) -> None:
    tools = {"f": {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}}
    grammar = json.loads(for_tools(format_name, tools, "required", False))
    for lark_or_schema in grammar["grammars"]:
        if "n" in lark_or_schema.get("json_schema", {}).get("properties", {}):
            assert "multipleOf" in lark_or_schema["json_schema"]["properties"]["n"]
    assert json.dumps(grammar).count("multipleOf") >= 1


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "-123456789012345678"),
        ({"type": "number"}, "-3.1415926535"),
        ({"type": "number"}, "0"),
        ({"type": "number", "minimum": 0, "maximum": 1}, "0.25"),
        ({"type": "number", "minimum": 0, "maximum": 1e-9}, "0.0000000001"),
        ({"type": "number", "minimum": 0, "multipleOf": 0.5}, "12.5"),
        ({"type": "integer", "enum": [7, 8]}, "8"),
    ],
)
def test_schema_of_a_number_with_bounds_is_unchanged(schema: dict[str, Any], text: str) -> None:
    assert accepted_prefix(for_schema(schema), text) == text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minimum": 1},
        {"type": "object", "properties": {"type": {"const": "integer"}}, "default": {"type": "number"}},
        {"type": "number", "minimum": 10**30},
        {"type": "integer", "anyOf": [{"minimum": 10**18}]},
        {"enum": [{"type": "number"}]},
        {"not": {"type": "number"}},
        {"type": 5},
        True,
    ],
)
def test_schemas_without_unbounded_numbers_are_unchanged(schema: Any) -> None:
    assert bounded(schema) == schema
