"""A small model at temperature 1 follows random schemas: each message is valid or ends at the token limit."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import jsonschema
import pytest
import pytest_asyncio
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helexa.core.errors import ApiError
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import SamplingParams
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.grammar import for_schema, for_tools
from helexa.neuron.text.model_text import ModelText
from helexa.neuron.text.tokenizer import Tokenizer
from neuron.grammar.schemas import Schema, schemas, tool_schemas
from neuron.grammar.test_tools import SPELLED
from neuron.parsers.piecewise_parsing import parse_pieces, parser
from nightly import cases

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMAS = cases(8, 100, "HELEXA_TEST_GENERATED")
MAX_TOKENS = 120


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    return ModelText.open(smollm2_gguf).tokenizer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(smollm2_gguf: Path) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(smollm2_gguf, EngineOptions(kv_cache_mb=64))
    yield client
    await client.close()


def drawn(strategy: st.SearchStrategy[Schema]) -> list[Schema]:
    """Draw `SCHEMAS` different schemas, the same in each run."""
    examples: list[Schema] = []

    @settings(max_examples=SCHEMAS, derandomize=True, database=None, phases=[Phase.generate])
    @given(strategy)
    def collect(schema: Schema):
        examples.append(schema)

    collect()
    return examples


async def generated(client: EngineClient, tokenizer: Tokenizer, prompt: str, grammars: list[str]) -> list[str | None]:
    """Generate one text per grammar, eight at a time; None if the token limit ended the text."""
    turn = asyncio.Semaphore(8)

    async def generate(seed: int, grammar: str) -> str | None:
        async with turn:
            outputs = client.generate(
                tokenizer.encode(prompt),
                max_tokens=MAX_TOKENS,
                sampling=SamplingParams(temperature=1, seed=seed),
                stop_ids=sorted(tokenizer.eos_ids),
                grammar=grammar,
            )
            tokens: list[int] = []
            async for output in outputs:
                tokens += output.tokens
                finish, error = output.finish, output.error
        assert finish in ("stop", "length"), error
        return tokenizer.decode(tokens) if finish == "stop" else None

    return await asyncio.gather(*(generate(seed, grammar) for seed, grammar in enumerate(grammars)))


async def test_output_of_grammars_from_random_schemas_is_valid(client: EngineClient, tokenizer: Tokenizer):
    drawn_schemas = drawn(schemas())
    texts = await generated(
        client, tokenizer, "An example, as JSON:\n", [for_schema(schema) for schema in drawn_schemas]
    )
    for schema, text in zip(drawn_schemas, texts, strict=True):
        if text is not None:
            checks = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
            checks.validate(json.loads(text))
    assert sum(text is not None for text in texts) > len(texts) / 3


async def test_tool_calls_of_grammars_from_random_schemas_are_parsed_and_valid(
    client: EngineClient, tokenizer: Tokenizer
):
    tools: list[tuple[str, Schema, str]] = []
    for number, schema in enumerate(drawn(tool_schemas())):
        format_name = SPELLED[number % len(SPELLED)]
        try:
            grammar = for_tools(format_name, {"get_it": schema}, "required", False, strict=["get_it"])
        except ApiError:
            continue  # the format cannot express this schema
        tools.append((format_name, schema, grammar))
    texts = await generated(client, tokenizer, "Now I call the tool:\n", [grammar for _, _, grammar in tools])
    for (format_name, schema, _), text in zip(tools, texts, strict=True):
        if text is not None:
            ((kind, name, arguments),) = parse_pieces(parser(format_name, {"get_it": schema}), [text])
            assert (kind, name) == ("call", "get_it")
            jsonschema.Draft202012Validator(schema).validate(json.loads(arguments))
    assert sum(text is not None for text in texts) > len(texts) / 3
