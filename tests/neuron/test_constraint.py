"""Forced calls and shaped answers: what the engine is told, and what a real model then says."""

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
from helexa.core.fleet import ModelSpec
from helexa.core.wire.openai_chat import ChatRequest
from helexa.neuron.engine.ipc.messages import EngineOptions, Generate
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.events import Finished, InferenceEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from helexa.neuron.lifecycle.model import ServedModel
from helexa.neuron.routes.chat import converse
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
    """Whether the grammar lets the whole text pass, and lets it end there."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


async def told(fields: dict[str, Any], template: str = AGENT_TEMPLATE, path: str = PATH) -> Generate:
    """What the engine is asked for."""
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
    ],
)
@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_the_engine_gets_the_shape_as_a_grammar(fields: dict[str, Any], good: str, bad: str, path: str) -> None:
    request = await told(fields, path=path)
    assert accepts(request.grammar, good) and not accepts(request.grammar, bad)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
async def test_any_text_needs_no_grammar(fields: dict[str, Any]) -> None:
    assert (await told(fields)).grammar == ""


async def test_a_shape_begins_after_the_thinking() -> None:
    request = await told({"response_format": FORMAT, "enable_thinking": True})
    assert accepts(request.grammar, "Hm.\n</think>\n\n" + ANIMAL)
    assert not accepts(request.grammar, ANIMAL) and not accepts(request.grammar, "Hm.</think>So " + ANIMAL)


async def test_a_model_that_begins_its_thinking_itself_may_or_may_not() -> None:
    hybrid = AGENT_TEMPLATE.replace(
        "{% if enable_thinking %}<think>\n", "{% if not enable_thinking %}<think>\n</think>\n"
    )
    request = await told({"response_format": FORMAT, "enable_thinking": True}, hybrid)
    assert TOKENIZER.decode(request.prompt).endswith("assistant\n")
    assert accepts(request.grammar, "<think>\nHm.\n</think>\n\n" + ANIMAL) and accepts(request.grammar, ANIMAL)
    request = await told({"response_format": FORMAT}, hybrid)
    assert TOKENIZER.decode(request.prompt).endswith("<think>\n</think>\n")
    assert accepts(request.grammar, ANIMAL) and not accepts(request.grammar, "<think>Hm.</think>" + ANIMAL)
    closed = AGENT_TEMPLATE.replace("{% if enable_thinking %}<think>\n", "{% if True %}<think>\n</think>\n")
    request = await told({"response_format": FORMAT, "enable_thinking": True}, closed)
    assert not accepts(request.grammar, "<think>Hm.</think>" + ANIMAL)


async def test_an_answer_after_ended_thinking_is_held_to_its_shape_alone() -> None:
    async def script(request: Generate, say: Say) -> None:
        await answer("x" if TOKENIZER.decode(request.prompt).endswith("</think>\n\n") else "Hm, so.")(request, say)

    async with serve(script, AGENT_TEMPLATE) as node:
        status, reply = await node.post(PATH, {**CHAT, "response_format": FORMAT, "thinking_budget": 3})
        assert status == 200, reply
        _, after = node.engine.requests
        assert accepts(after.grammar, ANIMAL) and not accepts(after.grammar, "Hm.</think>" + ANIMAL)


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
async def test_the_engine_gets_calls_as_a_grammar(fields: dict[str, Any], good: list[str], bad: list[str]) -> None:
    request = await told({"tools": [TOOL, OTHER], **fields})
    assert [text for text in good if not accepts(request.grammar, text)] == []
    assert [text for text in bad if accepts(request.grammar, text)] == []


async def test_strict_tools_hold_calls_that_nobody_forces() -> None:
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    request = await told({"tools": [strict]})
    assert accepts(request.grammar, "hello") and accepts(request.grammar, DRAW)
    assert not accepts(request.grammar, DRAW.replace("small", "huge"))
    assert (await told({"tools": [TOOL]})).grammar == ""


async def test_a_forced_call_is_answered_as_one() -> None:
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
async def test_calls_of_a_model_without_a_notation_cannot_be_forced(fields: dict[str, Any], param: str) -> None:
    async with serve(answer("x"), "{{ tools }}{{ messages }}") as node:
        status, code, message = await node.error(PATH, {**CHAT, **fields})
        assert (status, code) == (400, "unsupported_parameter")
        assert f"'{param}'" in message and "notation" in message


# With a real model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def smol(smollm2_gguf: Path) -> AsyncIterator[ServedModel]:
    """SmolLM2 with a chat template that has tools and thinking."""
    engine = await EngineClient.start(smollm2_gguf, EngineOptions(kv_cache_mb=64, context_length=1024, threads=1))
    text = ModelText(ModelText.open(smollm2_gguf).tokenizer, AGENT_TEMPLATE, {})
    model = ServedModel(MODEL, ModelSpec(model_id=MODEL), text, engine)
    try:
        yield model
    finally:
        await model.close()
        await model.grammars.aclose()


async def said(model: ServedModel, **fields: Any) -> tuple[str, str, list[tuple[str, str]], Finished]:
    """Thoughts, text, calls and the end of an answer."""
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
async def test_a_real_model_is_held_to_what_is_asked_for(smol: ServedModel) -> None:
    _, text, _, end = await said(smol, response_format=FORMAT)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert end.reason == "stop"

    _, text, calls, end = await said(smol, tools=[TOOL, OTHER], tool_choice=NAMED)
    assert (text, [name for name, _ in calls], end.reason) == ("", ["draw"], "tool_calls")
    jsonschema.validate(json.loads(calls[0][1]), SCHEMA)

    thoughts, text, _, end = await said(smol, response_format=FORMAT, thinking_budget=8)
    assert thoughts and "</think>" not in thoughts
    jsonschema.validate(json.loads(text), SCHEMA)
    assert end.reason == "stop" and 8 <= end.reasoning_tokens < 20

    eager = {smol.text.tokenizer.eos_id: 100.0}  # but no answer ends before its shape has begun
    thoughts, text, _, end = await said(smol, response_format=FORMAT, thinking_budget=8, logit_bias=eager)
    assert thoughts and end.reason == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_shape_beside_tools_holds_the_text_of_a_real_answer(smol: ServedModel) -> None:
    for seed in range(4):
        _, text, calls, _ = await said(smol, tools=[TOOL, OTHER], guided_regex="(cat|dog)s", seed=seed)
        assert text in ("cats", "dogs") if not calls else not text.strip()


@pytest.mark.asyncio(loop_scope="module")
async def test_what_of_a_schema_cannot_be_enforced_may_be_left_out(smol: ServedModel) -> None:
    closed = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    loose = {**closed, "not": {}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": loose}}
    with pytest.raises(ApiError, match="not"):
        await said(smol, response_format=wanted)
    wanted["json_schema"] = {"name": "x", "schema": loose, "strict": False}
    _, text, _, _ = await said(smol, response_format=wanted)
    assert isinstance(json.loads(text)["a"], bool)


@pytest.mark.asyncio(loop_scope="module")
async def test_several_real_answers_and_their_logprobs(smol: ServedModel) -> None:
    chat = ChatRequest.from_value({**CHAT, "temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 12, "logprobs": True})
    async with aclosing(await converse(smol, chat, "")) as stream:
        events: list[Any] = [event async for event in stream]
    pieces = [(event.index, event.event) for event in events[1:-1]]
    deltas = [(of, piece) for of, piece in pieces if isinstance(piece, TextDelta)]
    texts = ["".join(piece.text for of, piece in deltas if of == index) for index in range(3)]
    assert len(set(texts)) == 3
    told = b"".join(token.bytes for of, piece in deltas if of == 1 for token in piece.logprobs)
    assert told.decode(errors="replace") == texts[1]
    assert events[-1].completion_tokens == sum(
        piece.completion_tokens for _, piece in pieces if isinstance(piece, Finished)
    )


async def test_a_check_outlives_whoever_asked_for_it() -> None:
    model = scripted_model(answer("x"), template=AGENT_TEMPLATE)
    chat = ChatRequest.from_value({**CHAT, "guided_regex": "[a-z]+"})
    asked = asyncio.create_task(converse(model, chat, ""))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])
    await (await converse(model, chat, "")).aclose()
    await model.grammars.aclose()
