"""Reasoning and tool calls in chat completions, streamed and not, with a scripted engine."""

import asyncio
import json
from itertools import pairwise
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
    """Merge a stream's chunks into the choice and usage of a complete response."""
    message: dict[str, Any] = {"role": None, "content": "", "refusal": None}
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None}
    calls: list[dict[str, Any]] = []
    for chunk in [ChatCompletionChunk.model_validate_json(event) for event in data[:-2]]:
        (chunk_choice,) = chunk.choices
        delta = chunk_choice.delta.to_dict()
        message["role"] = delta.get("role") or message["role"]
        message["content"] += delta.get("content") or ""
        if thought := delta.get("reasoning_content"):
            message["reasoning_content"] = message.get("reasoning_content", "") + str(thought)
        for part in chunk_choice.delta.tool_calls or []:
            if part.index == len(calls):
                assert part.id and part.function and part.type
                calls.append({"id": part.id, "type": part.type, "function": {"name": part.function.name}})
            function = calls[part.index]["function"]
            assert part.function is not None
            function["arguments"] = function.get("arguments", "") + (part.function.arguments or "")
        if chunk_choice.finish_reason is not None:
            choice["finish_reason"] = chunk_choice.finish_reason
            if stop := chunk_choice.to_dict().get("stop_reason"):
                choice["stop_reason"] = stop
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return {"choice": choice, "usage": json.loads(data[-2])["usage"]}


async def both(node: Node, request: dict[str, Any], **headers: str) -> dict[str, Any]:
    """Send `request` streamed and not. Assert equal results; return the choice and the usage."""
    node.http.headers.update(headers)
    status, complete = await node.post(PATH, request)
    assert status == 200, complete
    ChatCompletion.model_validate(complete)
    streamed = folded(await node.events(PATH, request | USAGE))
    calls = [reply["message"].get("tool_calls", []) for reply in (complete["choices"][0], streamed["choice"])]
    ids = [call.pop("id") for item in calls for call in item]
    for usage in (complete["usage"], streamed["usage"]):
        del usage["helexa_timing"]  # an answer that the server ends has no timing of the engine
    assert len(set(ids)) == len(ids) and all(id.startswith("call_") for id in ids)
    assert streamed == {"choice": complete["choices"][0], "usage": complete["usage"]}
    return streamed


async def test_tool_calls_are_separated_from_surrounding_text() -> None:
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
async def test_tool_call_written_as_json_without_tags_is_returned_as_a_tool_call(text: str) -> None:
    async with serve(answer(text), AGENT_TEMPLATE) as node:
        choice = (await both(node, AGENT))["choice"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"place": "Köln"}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


@pytest.mark.parametrize(
    "change", [{"tools": None}, {"tool_choice": "none"}, {"response_format": {"type": "json_object"}}]
)
async def test_json_that_looks_like_a_tool_call_is_text_if_no_call_is_allowed(change: dict[str, Any]) -> None:
    async with serve(answer(BARE), AGENT_TEMPLATE) as node:
        choice = (await both(node, {**AGENT, **change}))["choice"]
    assert choice["message"] == {"role": "assistant", "content": BARE, "refusal": None}


async def test_json_text_is_streamed_as_soon_as_it_cannot_be_a_tool_call() -> None:
    async with serve(answer('{"name": "Bob"}'), AGENT_TEMPLATE) as node:
        data = await node.events(PATH, AGENT)
    pieces = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in data[:-2]]
    assert [piece for piece in pieces if piece] == ['{"name": "B', "o", "b", '"', "}"]


async def test_arguments_of_a_tool_call_are_streamed_during_generation() -> None:
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
async def test_malformed_tool_call_is_returned_as_text(text: str) -> None:
    async with serve(answer(text), AGENT_TEMPLATE) as node:
        choice = (await both(node, AGENT))["choice"]
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert choice["finish_reason"] == "stop"


async def test_tool_call_of_an_unknown_tool_is_returned_unchanged() -> None:
    async with serve(
        answer('<tool_call>\n{"name": "unheard_of", "arguments": {}}\n</tool_call>'), AGENT_TEMPLATE
    ) as node:
        choice = (await both(node, AGENT))["choice"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "unheard_of", "arguments": "{}"}
        assert choice["finish_reason"] == "tool_calls"


async def test_finish_reason_is_stop_after_a_malformed_tool_call() -> None:
    broken = '<tool_call>\n{"name": "weather", "arguments": {"place": , "x"}}\n</tool_call>'
    async with serve(answer(f"{broken}\n{NEXT}"), AGENT_TEMPLATE) as node:
        for parallel in (True, False):
            choice = (await both(node, {**AGENT, "parallel_tool_calls": parallel}))["choice"]
            assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"place": '
            assert choice["finish_reason"] == "stop"


async def test_tool_call_of_the_model_is_text_if_the_request_has_no_tools() -> None:
    async with serve(answer(CALL), AGENT_TEMPLATE) as node:
        for request in (CHAT, {**AGENT, "tool_choice": "none"}):
            choice = (await both(node, request))["choice"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert "weather" not in TOKENIZER.decode(node.engine.requests[-1].prompt)


async def test_answer_cut_off_in_a_tool_call_has_finish_reason_length() -> None:
    async with serve(answer(CALL[:60], finish="length"), AGENT_TEMPLATE) as node:
        choice = (await both(node, AGENT))["choice"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"place"')


async def test_answer_that_ends_within_a_tool_call_has_finish_reason_stop() -> None:
    async with serve(answer(CALL[:60]), AGENT_TEMPLATE) as node:
        assert (await both(node, AGENT))["choice"]["finish_reason"] == "stop"


async def test_second_tool_call_is_dropped_if_parallel_tool_calls_is_false() -> None:
    async with serve(answer(f"{CALL}\n{NEXT} and on"), AGENT_TEMPLATE) as node:
        choice = (await both(node, {**AGENT, "parallel_tool_calls": False}))["choice"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
        assert choice["finish_reason"] == "tool_calls"
        assert node.engine.cancelled.is_set()


@pytest.mark.parametrize("arguments", ['{"place": "Köln"}', {"place": "Köln"}])
async def test_chat_template_gets_arguments_of_earlier_tool_calls_as_objects(arguments: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    history = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    async with serve(answer("Rain."), AGENT_TEMPLATE) as node:
        await both(node, {**AGENT, "messages": [*CHAT["messages"], *history]})
        assert "place=Köln;" in TOKENIZER.decode(node.engine.requests[0].prompt)


async def test_chat_template_that_rejects_tools_is_a_422() -> None:
    template = "{% if tools %}{{ raise_exception('no such tools') }}{% endif %}hello"
    async with serve(answer("x"), template) as node:
        assert (await node.error(PATH, AGENT))[:2] == (422, "template_render_failed")
        assert (await node.post(PATH, CHAT))[0] == 200


# --- reasoning


@pytest.mark.parametrize(
    ("output", "thoughts", "text"),
    [
        ("Hm, 🦊.\n</think>\n\nYes.", "Hm, 🦊.", "Yes."),
        ("Hm", "Hm", ""),
        ("\n</think>\n\nYes.", None, "Yes."),
    ],
)
async def test_answer_begins_as_reasoning_if_the_prompt_ends_with_the_reasoning_marker(
    output: str, thoughts: str | None, text: str
) -> None:
    async with serve(answer(output, finish="length"), AGENT_TEMPLATE) as node:
        reply = await both(node, THINKING)
        message = reply["choice"]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (thoughts, text)
        marks = output.partition("</think>")
        details = reply["usage"]["completion_tokens_details"]
        inside = len((marks[0] + marks[1]).encode())
        assert inside <= details["reasoning_tokens"] <= len(output.encode()) - len(text.encode())


async def test_text_between_reasoning_markers_of_the_model_is_reasoning() -> None:
    async with serve(answer("<think>Hm.</think>Yes."), AGENT_TEMPLATE) as node:
        reply = await both(node, CHAT)
        assert reply["choice"]["message"]["reasoning_content"] == "Hm."
        assert reply["choice"]["message"]["content"] == "Yes."


async def test_text_before_a_closing_reasoning_marker_without_an_opening_one_is_reasoning() -> None:
    async with serve(answer(f"The weather.\n</think>\n\nI look.{CALL}"), AGENT_TEMPLATE) as node:
        _, complete = await node.post(PATH, AGENT)
        message = complete["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("The weather.\n", "I look.")
        assert len(message["tool_calls"]) == 1
        streamed = folded(await node.events(PATH, AGENT | USAGE))["choice"]["message"]
        assert (streamed.get("reasoning_content"), streamed["content"]) == (None, "The weather.\nI look.")


async def test_reasoning_before_a_tool_call_is_reported_as_reasoning() -> None:
    async with serve(answer(f"The weather.\n</think>\n\n{CALL}"), AGENT_TEMPLATE) as node:
        choice = (await both(node, {**AGENT, "enable_thinking": True}))["choice"]
        assert choice["message"]["reasoning_content"] == "The weather."
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"


async def test_reasoning_and_tool_call_markers_that_are_control_tokens_are_parsed_and_hidden() -> None:
    tokenizer = byte_tokenizer("<think>", "</think>", "<tool_call>", "</tool_call>")
    script = answer(f"<think>Hm.</think>\nYes.\n{CALL}", tokenizer=tokenizer)
    async with serve(script, AGENT_TEMPLATE, tokenizer=tokenizer) as node:
        reply = await both(node, AGENT)
        message = reply["choice"]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.\n")
        assert message["tool_calls"][0]["function"]["name"] == "weather"
        assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<Hm.>")}
        # Without tools, the control tokens of calls have no text.
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
async def test_request_fields_and_header_switch_reasoning_on_and_off(
    fields: dict[str, Any], header: str | None, thinks: bool
) -> None:
    async with serve(answer("x"), AGENT_TEMPLATE) as node:
        if header is not None:
            node.http.headers["x-include-thinking"] = header
        assert (await node.post(PATH, {**CHAT, **fields}))[0] == 200
        prompt = TOKENIZER.decode(node.engine.requests[0].prompt)
        assert prompt.endswith("<think>\n") is thinks


@pytest.mark.parametrize(("output", "text"), [
    ("Hm.\n</think>\n\nYes.", "<think>\nHm.\n</think>\n\nYes."),
    ("Hm", "<think>\nHm\n</think>\n\n"),
    (f"Hm.</think>{CALL}", "<think>\nHm.\n</think>\n\n"),
])  # fmt: skip
async def test_header_x_include_thinking_puts_reasoning_into_the_text(output: str, text: str) -> None:
    async with serve(answer(output), AGENT_TEMPLATE) as node:
        message = (await both(node, AGENT, **{"x-include-thinking": "true"}))["choice"]["message"]
        assert message["content"] == text
        assert "reasoning_content" not in message


def thinking(thoughts: str, text: str) -> Script:
    """Return a script that reasons without end until the prompt closes the reasoning, then generates `text`."""

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
async def test_reasoning_is_ended_at_the_thinking_budget(fields: dict[str, Any], thoughts: str) -> None:
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


@pytest.mark.parametrize("budget", [1, 5, 20, 40])
async def test_thinking_budget_does_not_cut_a_tool_call_made_before_the_reasoning_ended(budget: int) -> None:
    thoughts = "Hm."[: budget - 1]
    async with serve(answer(f"{thoughts}{CALL}"), AGENT_TEMPLATE) as node:
        choice = (await both(node, {**AGENT, "thinking_budget": budget}))["choice"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"place": "Köln"}'}
        assert choice["finish_reason"] == "tool_calls"
        assert len(node.engine.requests) == 2  # one streamed, one not


async def test_reasoning_that_quotes_a_tool_call_and_goes_on_ends_at_the_thinking_budget() -> None:
    async with serve(thinking(f"{CALL} so", "Yes."), AGENT_TEMPLATE) as node:
        message = (await both(node, {**AGENT, "thinking_budget": 9}))["choice"]["message"]
        assert message["reasoning_content"].startswith(CALL) and len(message["reasoning_content"]) <= len(f"{CALL} so")
        assert message["content"] == "Yes." and "tool_calls" not in message


@pytest.mark.parametrize("budget", [4, 9])
async def test_reasoning_that_the_model_reopens_after_its_budget_is_closed_again(budget: int) -> None:
    async def script(request: Generate, say: Say) -> None:
        closed = TOKENIZER.decode(request.prompt).count("</think>")
        if closed == 3:
            await answer("Yes.")(request, say)
            return
        say(tokens=TOKENIZER.encode("<think>" if closed else "Hm"))
        while True:
            say(tokens=TOKENIZER.encode("."))
            await asyncio.sleep(0)

    async with serve(script, AGENT_TEMPLATE) as node:
        reply = await both(node, {**AGENT, "thinking_budget": budget})
        message, usage = reply["choice"]["message"], reply["usage"]
        assert (message["content"], reply["choice"]["finish_reason"]) == ("Yes.", "stop")
        assert message["reasoning_content"].startswith("Hm.") and len(message["reasoning_content"]) <= budget + 2
        prompts = [TOKENIZER.decode(request.prompt) for request in node.engine.requests[:4]]
        assert [later.startswith(earlier) for earlier, later in pairwise(prompts)] == [True, True, True]
        assert usage["completion_tokens"] == len(prompts[3]) - len(prompts[0]) + len("Yes.") + 1
        assert node.engine.open_streams == 0


async def test_thinking_budget_that_is_not_reached_does_not_change_the_answer() -> None:
    async with serve(answer("Hm.</think>Yes."), AGENT_TEMPLATE) as node:
        message = (await both(node, {**CHAT, "thinking_budget": 11}))["choice"]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
        assert len(node.engine.requests) == 2  # one streamed, one not


async def test_thinking_budget_is_ignored_if_max_tokens_leaves_no_space_for_an_answer() -> None:
    async with serve(answer("x" * 20, finish="length"), AGENT_TEMPLATE) as node:
        choice = (await both(node, {**CHAT, "thinking_budget": 9, "max_tokens": 20}))["choice"]
        assert (choice["message"]["reasoning_content"], choice["finish_reason"]) == ("x" * 20, "length")


async def test_engine_failure_when_the_thinking_budget_ends_is_an_error_response() -> None:
    async with serve(thinking("Hm, so it is", "unheard"), AGENT_TEMPLATE) as node:
        first = node.engine.generate

        def generate(prompt: list[int], **settings: Any) -> Any:
            if "</think>" in TOKENIZER.decode(prompt):
                raise service_unavailable("the engine is gone", retry_after=2)
            return first(prompt, **settings)

        node.engine.generate = generate
        refused = await node.error(PATH, {**CHAT, "thinking_budget": 9})
        assert refused == (503, "service_unavailable", "the engine is gone")


# --- stop strings


async def test_stop_strings_match_in_text_but_not_in_reasoning_or_tool_calls() -> None:
    output = f"Köln or not?</think>Is it Kö\n{CALL}"
    async with serve(answer(output), AGENT_TEMPLATE) as node:
        choice = (await both(node, {**AGENT, "enable_thinking": True, "stop": ["Köln"]}))["choice"]
        assert choice["message"]["content"] == "Is it Kö\n"
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"place": "Köln"}
        assert "stop_reason" not in choice
        choice = (await both(node, {**AGENT, "enable_thinking": True, "stop": ["it K"]}))["choice"]
        assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("Is ", "stop", "it K")
