"""Forced tool calls and structured output: the grammars sent to the engine, and the output of a real model."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import pytest
import pytest_asyncio

from helexa.core.errors import ApiError
from helexa.core.node_reports import ModelSpec
from helexa.core.wire.openai_chat import ChatRequest
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.output_events import (
    Finished,
    InferenceEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from helexa.neuron.requests.inference import converse
from helexa.neuron.text.model_text import ModelText
from neuron.scripted_engine import AGENT_TEMPLATE, MODEL, TOKENIZER, Say, answer, scripted_model
from neuron.scripted_node import CHAT, TEXT, serve

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 8}},
    "required": ["size", "legs"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
ANIMAL = '{"size":"small","legs":4}'
TOOL = {"type": "function", "function": {"name": "draw", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "wipe", "parameters": {"type": "object", "properties": {}}}}
DRAW = '<tool_call>\n{"name": "draw", "arguments": {"size": "small", "legs": 4}}\n</tool_call>'
WIPE = '<tool_call>\n{"name": "wipe", "arguments": {}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "draw"}}
PATH = "/v1/chat/completions"


def accepts(grammar: str, text: str) -> bool:
    """Return whether the grammar accepts `text` as a complete text."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


async def engine_request(fields: dict[str, Any], template: str = AGENT_TEMPLATE, path: str = PATH) -> Generate:
    """Return the engine request for a chat or text completion with `fields`."""
    async with serve(answer("x"), template) as node:
        status, reply = await node.post(path, {**(CHAT if path == PATH else TEXT), **fields})
        assert status == 200, reply
        (request,) = node.engine.requests
        return request


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": FORMAT}, ANIMAL, '{"size":"huge","legs":4}'),
        ({"response_format": {"type": "json_object"}}, '{"a":[1]}', "[1]"),
        ({"guided_json": SCHEMA}, ANIMAL, "{}"),
        ({"guided_json": json.dumps(SCHEMA)}, ANIMAL, "{}"),
        ({"guided_regex": "[a-c]{2}"}, "ab", "abc"),
        ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
        ({"guided_grammar": 'start: "x" ("," "x")*'}, "x,x", "x,"),
        ({"structured_outputs": {"regex": "[a-c]{2}", "json": None}}, "ab", "abc"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        # the forms of llama.cpp, Together and SGLang
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, ANIMAL, "{}"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, ANIMAL, "{}"),
        ({"json_schema": SCHEMA}, ANIMAL, "{}"),
        ({"json_schema": json.dumps(SCHEMA)}, ANIMAL, "{}"),
        ({"regex": "[a-c]{2}"}, "ab", "abc"),
    ],
)
@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_response_format_becomes_a_grammar_that_accepts_only_valid_output(
    fields: dict[str, Any], good: str, bad: str, path: str
) -> None:
    request = await engine_request(fields, path=path)
    assert accepts(request.grammar, good) and not accepts(request.grammar, bad)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
async def test_request_without_constraints_has_no_grammar(fields: dict[str, Any]) -> None:
    assert (await engine_request(fields)).grammar == ""


async def test_grammar_of_structured_output_begins_after_the_reasoning() -> None:
    request = await engine_request({"response_format": FORMAT, "enable_thinking": True})
    assert accepts(request.grammar, "Hm.\n</think>\n\n" + ANIMAL)
    assert not accepts(request.grammar, ANIMAL) and not accepts(request.grammar, "Hm.</think>So " + ANIMAL)


async def test_grammar_allows_reasoning_first_only_if_the_template_lets_the_model_reason() -> None:
    hybrid = AGENT_TEMPLATE.replace(
        "{% if enable_thinking %}<think>\n", "{% if not enable_thinking %}<think>\n</think>\n"
    )
    request = await engine_request({"response_format": FORMAT, "enable_thinking": True}, hybrid)
    assert TOKENIZER.decode(request.prompt).endswith("assistant\n")
    assert accepts(request.grammar, "<think>\nHm.\n</think>\n\n" + ANIMAL) and accepts(request.grammar, ANIMAL)
    request = await engine_request({"response_format": FORMAT}, hybrid)
    assert TOKENIZER.decode(request.prompt).endswith("<think>\n</think>\n")
    assert accepts(request.grammar, ANIMAL) and not accepts(request.grammar, "<think>Hm.</think>" + ANIMAL)
    closed = AGENT_TEMPLATE.replace("{% if enable_thinking %}<think>\n", "{% if True %}<think>\n</think>\n")
    request = await engine_request({"response_format": FORMAT, "enable_thinking": True}, closed)
    assert not accepts(request.grammar, "<think>Hm.</think>" + ANIMAL)


async def test_grammar_after_the_thinking_budget_is_spent_allows_no_more_reasoning() -> None:
    async def script(request: Generate, say: Say) -> None:
        await answer("x" if TOKENIZER.decode(request.prompt).endswith("</think>\n\n") else "Hm, so.")(request, say)

    async with serve(script, AGENT_TEMPLATE) as node:
        status, reply = await node.post(PATH, {**CHAT, "response_format": FORMAT, "thinking_budget": 3})
        assert status == 200, reply
        _, second = node.engine.requests
        assert accepts(second.grammar, ANIMAL) and not accepts(second.grammar, "Hm.</think>" + ANIMAL)


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"tool_choice": "required"}, [DRAW, WIPE, f"{WIPE}\n{DRAW}"], ["hello", "", f"so {DRAW}"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [DRAW], [f"{WIPE}\n{DRAW}"]),
        ({"tool_choice": NAMED}, [DRAW], [WIPE, f"{DRAW}\n{DRAW}"]),
        ({"tool_choice": NAMED, "response_format": FORMAT}, [DRAW], [ANIMAL]),
        ({"response_format": FORMAT}, [ANIMAL, DRAW], ["hello"]),
    ],
)
async def test_tool_choice_that_forces_a_call_becomes_a_grammar_of_calls(
    fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    request = await engine_request({"tools": [TOOL, OTHER], **fields})
    assert [text for text in good if not accepts(request.grammar, text)] == []
    assert [text for text in bad if accepts(request.grammar, text)] == []


async def test_grammar_of_strict_tools_allows_text_or_calls_that_match_their_schema() -> None:
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    request = await engine_request({"tools": [strict]})
    assert accepts(request.grammar, "hello") and accepts(request.grammar, DRAW)
    assert not accepts(request.grammar, DRAW.replace("small", "huge"))
    assert (await engine_request({"tools": [TOOL]})).grammar == ""


@pytest.mark.parametrize(
    "keywords", [{"uniqueItems": True}, {"not": {"const": []}}, {"if": {"minItems": 1}, "then": {}}]
)
@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "draw"}}])
async def test_forced_or_strict_tool_call_is_400_if_its_schema_cannot_be_enforced(
    keywords: dict[str, Any], tool_choice: Any
) -> None:
    schema = {"type": "object", "properties": {"sizes": {"type": "array", **keywords}}}
    tool = {"type": "function", "function": {"name": "draw", "parameters": schema}}
    async with serve(answer("x"), AGENT_TEMPLATE) as node:
        status, code, message = await node.error(PATH, {**CHAT, "tools": [tool], "tool_choice": tool_choice})
        assert (status, code) == (400, "invalid_schema")
        assert "tool 0 at /properties/sizes" in message and "'strict': false" in message
    tool["function"]["strict"] = False  # type: ignore[index]
    assert (await engine_request({"tools": [tool], "tool_choice": tool_choice})).grammar
    del tool["function"]["strict"]  # type: ignore[attr-defined]
    assert (await engine_request({"tools": [tool]})).grammar == ""


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("text", ["{}", "```json\n{}\n```", "I draw.\n```json\n{}"])
async def test_tool_call_without_tags_is_recognized_for_strict_and_other_tools(text: str, strict: bool) -> None:
    call = '{"name": "draw", "arguments": {"size": "small", "legs": 4}}'
    tool = {**TOOL, "function": {**TOOL["function"], "strict": strict}}  # type: ignore[dict-item]
    async with serve(answer(text.replace("{}", call)), AGENT_TEMPLATE) as node:
        _, reply = await node.post(PATH, {**CHAT, "tools": [tool]})
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [called["function"]["name"] for called in choice["message"]["tool_calls"]] == ["draw"]
    assert "name" not in (choice["message"]["content"] or "")


async def test_grammar_of_strict_tools_also_constrains_calls_without_tags() -> None:
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    request = await engine_request({"tools": [strict]})
    call = DRAW.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert accepts(request.grammar, "So:\n" + call)
    assert not accepts(request.grammar, "So:\n" + call.replace("small", "huge"))


async def test_forced_call_is_returned_as_a_tool_call() -> None:
    async with serve(answer(DRAW), AGENT_TEMPLATE) as node:
        _, reply = await node.post(PATH, {**CHAT, "tools": [TOOL], "tool_choice": NAMED})
        (choice,) = reply["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "draw"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "response_format": FORMAT}, "response_format"),
    ],
)
async def test_forced_tool_call_is_400_if_the_model_has_no_tool_call_format(fields: dict[str, Any], param: str) -> None:
    async with serve(answer("x"), "{{ tools }}{{ messages }}") as node:
        status, code, message = await node.error(PATH, {**CHAT, **fields})
        assert (status, code) == (400, "unsupported_parameter")
        assert f"'{param}'" in message and "tool-call format" in message


# With a real model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def smol(smollm2_gguf: Path) -> AsyncIterator[ServedModel]:
    """SmolLM2 with a chat template that supports tools and reasoning."""
    engine = await EngineClient.start(smollm2_gguf, EngineOptions(kv_cache_mb=64, context_length=1024, threads=1))
    text = ModelText(ModelText.open(smollm2_gguf).tokenizer, AGENT_TEMPLATE, {})
    model = ServedModel(MODEL, ModelSpec(model_id=MODEL), text, engine)
    try:
        yield model
    finally:
        await model.close()
        await model.grammars.aclose()


async def generated(model: ServedModel, **fields: Any) -> tuple[str, str, list[tuple[str, str]], Finished]:
    """Return the reasoning, text, tool calls and last event of an answer."""
    messages = [{"role": "user", "content": "Think of an animal."}]
    chat = ChatRequest.from_value({"model": MODEL, "messages": messages, "temperature": 1.0, "seed": 3, **fields})
    async with aclosing(await converse(model, chat, "", thinks=False)) as stream:
        events: list[InferenceEvent] = [event async for event in stream]
    last = events[-1]
    assert isinstance(last, Finished), last
    names = {event.index: event.name for event in events if isinstance(event, ToolCallStart)}
    calls = [
        (name, "".join(e.arguments for e in events if isinstance(e, ToolCallDelta) and e.index == index))
        for index, name in names.items()
    ]
    thoughts = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    return thoughts, "".join(event.text for event in events if isinstance(event, TextDelta)), calls, last


@pytest.mark.asyncio(loop_scope="module")
async def test_output_of_a_real_model_follows_its_json_schema(smol: ServedModel) -> None:
    _, text, _, end = await generated(smol, response_format=FORMAT)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert end.reason == "stop"

    _, text, calls, end = await generated(smol, tools=[TOOL, OTHER], tool_choice=NAMED)
    assert (text, [name for name, _ in calls], end.reason) == ("", ["draw"], "tool_calls")
    jsonschema.validate(json.loads(calls[0][1]), SCHEMA)

    thoughts, text, _, end = await generated(smol, response_format=FORMAT, thinking_budget=8)
    assert thoughts and "</think>" not in thoughts
    jsonschema.validate(json.loads(text), SCHEMA)
    assert end.reason == "stop" and 8 <= end.reasoning_tokens < 20

    eager = {smol.text.tokenizer.eos_id: 100.0}  # the grammar must prevent an immediate end of the answer
    thoughts, text, _, end = await generated(smol, response_format=FORMAT, thinking_budget=8, logit_bias=eager)
    assert thoughts and end.reason == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.asyncio(loop_scope="module")
async def test_real_model_follows_a_schema_with_optional_tools(smol: ServedModel) -> None:
    for seed in range(4):
        _, text, calls, _ = await generated(smol, tools=[TOOL, OTHER], guided_regex="(cat|dog)s", seed=seed)
        assert text in ("cats", "dogs") if not calls else not text.strip()


@pytest.mark.asyncio(loop_scope="module")
async def test_schema_keywords_that_cannot_be_enforced_are_ignored_if_strict_is_false(smol: ServedModel) -> None:
    closed = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    loose = {**closed, "not": {"required": ["b"]}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": loose}}
    with pytest.raises(ApiError, match="not"):
        await generated(smol, response_format=wanted)
    wanted["json_schema"] = {"name": "x", "schema": loose, "strict": False}
    _, text, _, _ = await generated(smol, response_format=wanted)
    assert isinstance(json.loads(text)["a"], bool)


@pytest.mark.asyncio(loop_scope="module")
async def test_three_answers_of_a_real_model_have_their_own_text_and_log_probabilities(smol: ServedModel) -> None:
    chat = ChatRequest.from_value({**CHAT, "temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 12, "logprobs": True})
    async with aclosing(await converse(smol, chat, "")) as stream:
        events: list[Any] = [event async for event in stream]
    events_of_choices = [(event.index, event.event) for event in events[1:-1]]
    deltas = [(choice, event) for choice, event in events_of_choices if isinstance(event, TextDelta)]
    texts = ["".join(event.text for choice, event in deltas if choice == index) for index in range(3)]
    assert len(set(texts)) == 3
    logprob_bytes = b"".join(token.bytes for choice, event in deltas if choice == 1 for token in event.logprobs)
    assert logprob_bytes.decode(errors="replace") == texts[1]
    assert events[-1].completion_tokens == sum(
        event.completion_tokens for _, event in events_of_choices if isinstance(event, Finished)
    )


async def test_grammar_is_usable_after_the_first_request_that_checked_it_was_canceled() -> None:
    model = scripted_model(answer("x"), template=AGENT_TEMPLATE)
    chat = ChatRequest.from_value({**CHAT, "guided_regex": "[a-z]+"})
    checking = asyncio.create_task(converse(model, chat, ""))
    await asyncio.sleep(0)
    checking.cancel()
    await asyncio.wait([checking])
    await (await converse(model, chat, "")).aclose()
    await model.grammars.aclose()
