"""Every text that a schema's grammar accepts is valid for the schema."""

import json
import random
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from helexa.neuron.grammar import for_schema
from helexa.neuron.text.model_text import ModelText
from neuron.grammar.random_walks import Vocabulary, byte_level, of_model, walk
from neuron.grammar.schemas import Schema, schemas
from nightly import cases

SCHEMAS = cases(100, 2000, "HELEXA_TEST_SCHEMAS")
BYTES = byte_level()


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Vocabulary:
    return of_model(ModelText.open(smollm2_gguf).tokenizer)


def valid(schema: Schema, text: str):
    checks = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    checks.validate(json.loads(text))


@settings(max_examples=SCHEMAS)
@given(schemas(), st.integers(0, 2**32))
def test_random_texts_accepted_by_a_schema_grammar_are_valid(schema: Schema, seed: int):
    text, complete = walk(BYTES, for_schema(schema), random.Random(seed))
    if complete:
        valid(schema, text)


@settings(max_examples=SCHEMAS // 3)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_random_texts_in_a_real_vocabulary_accepted_by_a_schema_grammar_are_valid(
    smollm2: Vocabulary, schema: Schema, seed: int
):
    text, complete = walk(smollm2, for_schema(schema), random.Random(seed), 200)
    if complete:
        valid(schema, text)


_LETTERS = {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, ["{}", '{"b":1}'], ['{"a":1}']),
        ({"anyOf": [{"not": {}}, {"type": "string"}]}, ['"a"'], ["1"]),
        ({"type": "array", "items": {"not": {}, "type": "string"}}, ["[]"], ['["a"]']),
        (_LETTERS, ["{}", '{"a":1,"b":2}'], ['{"a":"x"}', '{"c":1}']),
        ({"type": "object", "propertyNames": {"pattern": "^x[0-9]$"}}, ['{"x1":null}'], ['{"y1":1}', '{"x":1}']),
        (
            {"type": "object", "properties": {"a": {"type": "null"}}, "unevaluatedProperties": False},
            ["{}", '{"a":null}'],
            ['{"b":1}', '{"a":1}'],
        ),
    ],
)
def test_schema_keywords_that_llguidance_rejects_are_replaced_by_equivalent_ones(
    schema: Schema, good: list[str], bad: list[str]
):
    checks = jsonschema.Draft202012Validator(schema)
    for text in good + bad:
        matcher = LLMatcher(LLTokenizer("byte"), for_schema(schema))
        tokens = [*text.encode()]
        accepted = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert accepted == checks.is_valid(json.loads(text)) == (text in good), text
