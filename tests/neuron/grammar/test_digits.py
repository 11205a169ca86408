"""Numbers without bounds end."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from helexa.neuron.grammar import for_schema, for_tools
from helexa.neuron.grammar.digits import bounded

TOKENIZER = LLTokenizer("byte")
ENDLESS = ["1" * 40, "-" + "7" * 40, "0." + "3" * 40, "1." + "0" * 40]


def taken(grammar: str, text: str) -> str:
    """The beginning of `text` that the grammar allows."""
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
        {"type": "integer", "multipleOf": 1},
        {"anyOf": [{"type": "string"}, {"type": "number"}]},
        {"$ref": "#/$defs/n"},
    ],
)
@pytest.mark.parametrize("text", ENDLESS)
def test_a_number_without_bounds_has_few_digits(schema: dict[str, Any], text: str) -> None:
    defined = {"n": {"type": "number"}}
    whole = for_schema({"type": "object", "properties": {"n": schema}, "required": ["n"], "$defs": defined})
    assert len(taken(whole, '{"n":' + text)) <= len('{"n":-') + 18 + 12


@pytest.mark.parametrize("family", ["hermes", "qwen_xml", "llama3_json", "pythonic", "mistral", "deepseek"])
def test_a_tools_numbers_have_few_digits(family: str) -> None:
    tools = {"f": {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}}
    grammar = json.loads(for_tools(family, tools, "required", False))
    for part in grammar["grammars"]:
        if "n" in part.get("json_schema", {}).get("properties", {}):
            assert "multipleOf" in part["json_schema"]["properties"]["n"]
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
def test_other_numbers_are_as_before(schema: dict[str, Any], text: str) -> None:
    assert taken(for_schema(schema), text) == text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minimum": 1},
        {"type": "object", "properties": {"type": {"const": "integer"}}, "default": {"type": "number"}},
        {"type": "number", "maximum": 10**30},
        {"type": "integer", "anyOf": [{"minimum": 10**18}]},
        {"enum": [{"type": "number"}]},
        {"not": {"type": "number"}},
        {"type": 5},
        True,
    ],
)
def test_what_is_no_unbounded_number_is_left_alone(schema: Any) -> None:
    assert bounded(schema) == schema
