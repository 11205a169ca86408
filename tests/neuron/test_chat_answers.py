"""Reasoning and tool calls over a real socket, streamed and whole, in front of a scripted engine."""

import asyncio
import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from helexa.core.errors import service_unavailable
from helexa.neuron.engine.ipc.messages import Generate
from neuron.scripted_engine import AGENT_TEMPLATE, TOKENIZER, Say, Script, answer, byte_tokenizer
from neuron.scripted_node import CHAT, USAGE, Node, serve

PATH = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "time", "description": None}}
AGENT: dict[str, Any] = {**CHAT, "tools": [WEATHER, TIME]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Köln"}}\n</tool_call>'
NEXT = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
THINKING: dict[str, Any] = {**CHAT, "enable_thinking": True}


def folded(data: list[str]) -> dict[str, Any]:
    """What a stream's chunks add up to, in the shape of a whole reply."""
    message: dict[str, Any] = {"role": None, "content": "", "refusal": None}
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None}
    calls: list[dict[str, Any]] = []
    for chunk in [ChatCompletionChunk.model_validate_json(event) for event in data[:-2]]:
        (said,) = chunk.choices
        delta = said.delta.to_dict()
        message["role"] = delta.get("role") or message["role"]
        message["content"] += delta.get("content") or ""
        if thought := delta.get("reasoning_content"):
            message["reasoning_content"] = message.get("reasoning_content", "") + str(thought)
        for piece in said.delta.tool_calls or []:
            if piece.index == len(calls):
                assert piece.id and piece.function and piece.type
                calls.append({"id": piece.id, "type": piece.type, "function": {"name": piece.function.name}})
            function = calls[piece.index]["function"]
            assert piece.function is not None
            function["arguments"] = function.get("arguments", "") + (piece.function.arguments or "")
        if said.finish_reason is not None:
            choice["finish_reason"] = said.finish_reason
            if stop := said.to_dict().get("stop_reason"):
                choice["stop_reason"] = stop
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return {"choice": choice, "usage": json.loads(data[-2])["usage"]}


async def both(node: Node, request: dict[str, Any], **headers: str) -> dict[str, Any]:
    """The choice and the usage of the reply, which are the same streamed and not."""
    node.http.headers.update(headers)
    status, whole = await node.post(PATH, request)
    assert status == 200, whole
    ChatCompletion.model_validate(whole)
    streamed = folded(await node.events(PATH, request | USAGE))
    calls = [reply["message"].get("tool_calls", []) for reply in (whole["choices"][0], streamed["choice"])]
    ids = [call.pop("id") for one in calls for call in one]
    for usage in (whole["usage"], streamed["usage"]):
        del usage["helexa_timing"]  # what is stopped from here has no times of the engine's
    assert len(set(ids)) == len(ids) and all(id.startswith("call_") for id in ids)
    assert streamed == {"choice": whole["choices"][0], "usage": whole["usage"]}
    return streamed


async def test_a_call_is_told_from_the_text_around_it() -> None:
    async with serve(answer(f"I look it up.\n{CALL}\n{NEXT}"), AGENT_TEMPLATE) as node:
        choice = (await both(node, AGENT))["choice"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "I look it up.\n"
        functions = [call["function"] for call in choice["message"]["tool_calls"]]
        assert [(function["name"], json.loads(function["arguments"])) for function in functions] == [
            ("weather", {"place": "Köln"}),
            ("time", {}),
        ]
        prompt = TOKENIZER.decode(node.engine.requests[0].prompt)
        assert '"name": "weather"' in prompt and '"place"' in prompt and "null" not in prompt


BARE = '{"name": "weather", "arguments": {"place": "Köln"}}'


@pytest.mark.parametrize("text", [BARE, f"```json\n{BARE}\n```"])
async def test_a_call_as_json_in_the_text_is_a_call(text: str) -> None:
    async with serve(answer(text), AGENT_TEMPLATE) as node:
        choice = (await both(node, AGENT))["choice"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"place": "Köln"}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


@pytest.mark.parametrize(
    "change", [{"tools": None}, {"tool_choice": "none"}, {"response_format": {"type": "json_object"}}]
)
async def test_json_that_looks_like_a_call_is_text_where_no_call_is_possible(change: dict[str, Any]) -> None:
    async with serve(answer(BARE), AGENT_TEMPLATE) as node:
        choice = (await both(node, {**AGENT, **change}))["choice"]
    assert choice["message"] == {"role": "assistant", "content": BARE, "refusal": None}


async def test_json_text_is_streamed_from_the_character_that_rules_a_call_out() -> None:
    async with serve(answer('{"name": "Bob"}'), AGENT_TEMPLATE) as node:
        data = await node.events(PATH, AGENT)
    pieces = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in data[:-2]]
    assert [piece for piece in pieces if piece] == ['{"name": "B', "o", "b", '"', "}"]


async def test_arguments_come_while_they_are_generated() -> None:
    async with serve(answer(CALL), AGENT_TEMPLATE) as node:
        data = await node.events(PATH, AGENT)
    pieces = [
        call["function"]["arguments"]
        for event in data[:-2]
        for choice in json.loads(event)["choices"]
        for call in choice["delta"].get("tool_calls", [])
    ]
    assert len(pieces) > 10 and "".join(pieces) == '{"place": "Köln"}'


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>garbage</tool_call>",
        "<tool_call>",
    ],
)
async def test_what_is_no_call_comes_back_as_text(text: str) -> None:
    async with serve(answer(text), AGENT_TEMPLATE) as node:
        choice = (await both(node, AGENT))["choice"]
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert choice["finish_reason"] == "stop"


async def test_a_call_of_a_tool_that_is_not_there_is_told_as_it_is() -> None:
    async with serve(
        answer('<tool_call>\n{"name": "unheard_of", "arguments": {}}\n</tool_call>'), AGENT_TEMPLATE
    ) as node:
        choice = (await both(node, AGENT))["choice"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "unheard_of", "arguments": "{}"}
        assert choice["finish_reason"] == "tool_calls"


async def test_a_broken_call_before_a_whole_one_is_none_to_answer() -> None:
    broken = '<tool_call>\n{"name": "weather", "arguments": {"place": Köln}}\n</tool_call>'
    async with serve(answer(f"{broken}\n{NEXT}"), AGENT_TEMPLATE) as node:
        for parallel in (True, False):
            choice = (await both(node, {**AGENT, "parallel_tool_calls": parallel}))["choice"]
            assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"place": '
            assert choice["finish_reason"] == "stop"


async def test_without_tools_nothing_is_a_call() -> None:
    async with serve(answer(CALL), AGENT_TEMPLATE) as node:
        for request in (CHAT, {**AGENT, "tool_choice": "none"}):
            choice = (await both(node, request))["choice"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert "weather" not in TOKENIZER.decode(node.engine.requests[-1].prompt)


async def test_a_call_that_is_cut_off_ended_by_length() -> None:
    async with serve(answer(CALL[:60], finish="length"), AGENT_TEMPLATE) as node:
        choice = (await both(node, AGENT))["choice"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"place"')


async def test_a_call_that_the_model_broke_off_is_none_to_answer() -> None:
    async with serve(answer(CALL[:60]), AGENT_TEMPLATE) as node:
        assert (await both(node, AGENT))["choice"]["finish_reason"] == "stop"


async def test_one_call_at_a_time() -> None:
    async with serve(answer(f"{CALL}\n{NEXT} and on"), AGENT_TEMPLATE) as node:
        choice = (await both(node, {**AGENT, "parallel_tool_calls": False}))["choice"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
        assert choice["finish_reason"] == "tool_calls"
        assert node.engine.cancelled.is_set()


@pytest.mark.parametrize("arguments", ['{"place": "Köln"}', {"place": "Köln"}])
async def test_the_template_gets_arguments_of_the_history_as_objects(arguments: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    history = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    async with serve(answer("Rain."), AGENT_TEMPLATE) as node:
        await both(node, {**AGENT, "messages": [*CHAT["messages"], *history]})
        assert "place=Köln;" in TOKENIZER.decode(node.engine.requests[0].prompt)


async def test_tools_that_the_template_fails_on_are_a_422() -> None:
    template = "{% if tools %}{{ raise_exception('no such tools') }}{% endif %}hello"
    async with serve(answer("x"), template) as node:
        assert (await node.error(PATH, AGENT))[:2] == (422, "template_render_failed")
        assert (await node.post(PATH, CHAT))[0] == 200


# Reasoning


@pytest.mark.parametrize(
    ("said", "thoughts", "text"),
    [
        ("Hm, 🦊.\n</think>\n\nYes.", "Hm, 🦊.", "Yes."),
        ("Hm", "Hm", ""),
        ("\n</think>\n\nYes.", None, "Yes."),
    ],
)
async def test_a_prompt_that_opens_the_block_is_answered_inside_it(said: str, thoughts: str | None, text: str) -> None:
    async with serve(answer(said, finish="length"), AGENT_TEMPLATE) as node:
        reply = await both(node, THINKING)
        message = reply["choice"]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (thoughts, text)
        marks = said.partition("</think>")
        details = reply["usage"]["completion_tokens_details"]
        inside = len((marks[0] + marks[1]).encode())
        assert inside <= details["reasoning_tokens"] <= len(said.encode()) - len(text.encode())


async def test_a_block_that_the_model_opens_is_reasoning_too() -> None:
    async with serve(answer("<think>Hm.</think>Yes."), AGENT_TEMPLATE) as node:
        reply = await both(node, CHAT)
        assert reply["choice"]["message"]["reasoning_content"] == "Hm."
        assert reply["choice"]["message"]["content"] == "Yes."


async def test_what_a_lone_mark_ends_was_reasoning() -> None:
    async with serve(answer(f"The weather.\n</think>\n\nI look.{CALL}"), AGENT_TEMPLATE) as node:
        _, whole = await node.post(PATH, AGENT)
        message = whole["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("The weather.\n", "I look.")
        assert len(message["tool_calls"]) == 1
        streamed = folded(await node.events(PATH, AGENT | USAGE))["choice"]["message"]
        assert (streamed.get("reasoning_content"), streamed["content"]) == (None, "The weather.\nI look.")


async def test_thinking_and_calling() -> None:
    async with serve(answer(f"The weather.\n</think>\n\n{CALL}"), AGENT_TEMPLATE) as node:
        choice = (await both(node, {**AGENT, "enable_thinking": True}))["choice"]
        assert choice["message"]["reasoning_content"] == "The weather."
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"


async def test_marks_that_are_control_tokens_are_seen_and_not_shown() -> None:
    tokenizer = byte_tokenizer("<think>", "</think>", "<tool_call>", "</tool_call>")
    script = answer(f"<think>Hm.</think>\nYes.\n{CALL}", tokenizer=tokenizer)
    async with serve(script, AGENT_TEMPLATE, tokenizer=tokenizer) as node:
        reply = await both(node, AGENT)
        message = reply["choice"]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.\n")
        assert message["tool_calls"][0]["function"]["name"] == "weather"
        assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<Hm.>")}
        # Without tools a call's marks have no text, as other control tokens.
        assert "tool_call" not in (await both(node, CHAT))["choice"]["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "header", "thinks"),
    [
        ({}, None, False),
        ({}, "true", True),
        ({}, "0", False),
        ({"reasoning_effort": "low"}, None, True),
        ({"reasoning_effort": "none"}, "yes", False),
        ({"enable_thinking": True}, None, True),
        ({"enable_thinking": False, "reasoning_effort": "high"}, "1", False),
        ({"thinking_budget": 5}, None, True),
        ({"thinking_budget": 5, "enable_thinking": False}, None, False),
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, None, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "true", False),
    ],
)
async def test_the_client_decides_whether_the_model_thinks(
    fields: dict[str, Any], header: str | None, thinks: bool
) -> None:
    async with serve(answer("x"), AGENT_TEMPLATE) as node:
        if header is not None:
            node.http.headers["x-include-thinking"] = header
        assert (await node.post(PATH, {**CHAT, **fields}))[0] == 200
        prompt = TOKENIZER.decode(node.engine.requests[0].prompt)
        assert prompt.endswith("<think>\n") is thinks


@pytest.mark.parametrize(("said", "text"), [
    ("Hm.\n</think>\n\nYes.", "<think>\nHm.\n</think>\n\nYes."),
    ("Hm", "<think>\nHm\n</think>\n\n"),
    (f"Hm.</think>{CALL}", "<think>\nHm.\n</think>\n\n"),
])  # fmt: skip
async def test_thoughts_are_text_for_who_says_so(said: str, text: str) -> None:
    async with serve(answer(said), AGENT_TEMPLATE) as node:
        message = (await both(node, AGENT, **{"x-include-thinking": "true"}))["choice"]["message"]
        assert message["content"] == text
        assert "reasoning_content" not in message


def thinking(thoughts: str, text: str) -> Script:
    """Thinks `thoughts` and then for ever, until it finds that it did; then says `text`."""

    async def script(request: Generate, say: Say) -> None:
        done = "</think>" in TOKENIZER.decode(request.prompt)
        if done:
            await answer(text, cached=7)(request, say)
            return
        say(tokens=TOKENIZER.encode(thoughts), cached_tokens=3)
        while True:
            say(tokens=TOKENIZER.encode("."))
            await asyncio.sleep(0)

    return script


@pytest.mark.parametrize("fields", [{"thinking_budget": 9}, {"chat_template_kwargs": {"thinking_budget": 9}}])
@pytest.mark.parametrize("thoughts", ["Hm, so", "Hm, so it is that or the other"])
async def test_thinking_ends_at_its_budget(fields: dict[str, Any], thoughts: str) -> None:
    async with serve(thinking(thoughts, f"Yes.\n{CALL}"), AGENT_TEMPLATE) as node:
        reply = await both(node, {**AGENT, **fields, "stop": ["never"], "seed": 5})
        message, usage = reply["choice"]["message"], reply["usage"]
        assert message["reasoning_content"] == f"{thoughts}..........."[:9]
        assert message["content"] == "Yes.\n" and reply["choice"]["finish_reason"] == "tool_calls"
        first, second = node.engine.requests[:2]
        closing = "\n</think>\n\n"
        assert (
            TOKENIZER.decode(second.prompt) == TOKENIZER.decode(first.prompt) + message["reasoning_content"] + closing
        )
        assert usage["prompt_tokens"] == len(first.prompt)
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 9 + len("\n</think>")
        assert usage["completion_tokens"] == 9 + len(closing) + len(f"Yes.\n{CALL}".encode()) + 1
        assert usage["prompt_tokens_details"]["cached_tokens"] == 3
        assert second.max_tokens == first.max_tokens - 9 - len(closing)
        assert (second.sampling, second.salt) == (first.sampling, first.salt)
        assert (first.prior_output, len(first.prompt) + second.prior_output) == (0, len(second.prompt))
        assert node.engine.open_streams == 0


async def test_a_budget_that_is_not_used_up_changes_nothing() -> None:
    async with serve(answer("Hm.</think>Yes."), AGENT_TEMPLATE) as node:
        message = (await both(node, {**CHAT, "thinking_budget": 11}))["choice"]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
        assert len(node.engine.requests) == 2  # streamed and not


async def test_a_budget_that_leaves_no_room_for_an_answer_is_none() -> None:
    async with serve(answer("x" * 20, finish="length"), AGENT_TEMPLATE) as node:
        choice = (await both(node, {**CHAT, "thinking_budget": 9, "max_tokens": 20}))["choice"]
        assert (choice["message"]["reasoning_content"], choice["finish_reason"]) == ("x" * 20, "length")


async def test_an_engine_that_dies_at_the_end_of_the_budget_is_a_failure() -> None:
    async with serve(thinking("Hm, so it is", "unheard"), AGENT_TEMPLATE) as node:
        first = node.engine.generate

        def generate(prompt: list[int], **settings: Any) -> Any:
            if "</think>" in TOKENIZER.decode(prompt):
                raise service_unavailable("the engine is gone", retry_after=2)
            return first(prompt, **settings)

        node.engine.generate = generate
        refused = await node.error(PATH, {**CHAT, "thinking_budget": 9})
        assert refused == (503, "service_unavailable", "the engine is gone")


# Stop strings


async def test_stop_strings_are_looked_for_in_the_text_alone() -> None:
    said = f"Köln or not?</think>Is it Kö\n{CALL}"
    async with serve(answer(said), AGENT_TEMPLATE) as node:
        choice = (await both(node, {**AGENT, "enable_thinking": True, "stop": ["Köln"]}))["choice"]
        assert choice["message"]["content"] == "Is it Kö\n"
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"place": "Köln"}
        assert "stop_reason" not in choice
        choice = (await both(node, {**AGENT, "enable_thinking": True, "stop": ["it K"]}))["choice"]
        assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("Is ", "stop", "it K")
