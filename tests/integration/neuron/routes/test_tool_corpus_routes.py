"""Random tool calls with mistakes and cuts over HTTP: no server error, no marker, no invalid arguments.

`HELEXA_TOOL_CORPUS` sets the number of outputs per format.
"""

import json
from random import Random
from typing import Any

import pytest

from helexa.neuron.engine.ipc.messages import Generate
from helexa.neuron.parsers.formats.tool_call_format import TOOL_CALL_FORMATS
from neuron.parsers.piecewise_parsing import SIMILAR_FORMATS, TOOLS
from neuron.parsers.test_tool_corpus import FORMATS, PARSERS
from neuron.parsers.tool_corpus import outputs
from neuron.scripted_engine import AGENT_TEMPLATE, END, TIMING, Say, byte_tokenizer
from neuron.scripted_node import CHAT, Node, serve
from nightly import cases, daily

COUNT = cases(3, 300, "HELEXA_TOOL_CORPUS")
WHOLE = 1 << 14  # tokens; no output is longer
FUNCTIONS = [{"name": name, "parameters": schema} for name, schema in TOOLS.items()]
ASK = {**CHAT, "tools": [{"type": "function", "function": function} for function in FUNCTIONS]}
RESPONSES = {"model": CHAT["model"], "input": "hi", "tools": [{"type": "function", **each} for each in FUNCTIONS]}

Answer = tuple[str, list[tuple[str, str]], str]
"""Text, tool calls with their arguments, and finish reason."""


async def complete_chat(node: Node, limit: int) -> Answer:
    status, reply = await node.post("/v1/chat/completions", {**ASK, "max_tokens": limit})
    assert status == 200, reply
    (choice,) = reply["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return (
        choice["message"]["content"] or "",
        [(call["name"], call["arguments"]) for call in calls],
        choice["finish_reason"],
    )


async def streamed_chat(node: Node, limit: int) -> Answer:
    *events, last = await node.events("/v1/chat/completions", {**ASK, "max_tokens": limit})
    assert last == "[DONE]"
    text, reason, calls = "", "", list[tuple[str, str]]()
    for choice in [choice for event in events for choice in json.loads(event)["choices"]]:
        text += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
        for part in choice["delta"].get("tool_calls", []):
            name, arguments = calls.pop() if part["index"] < len(calls) else ("", "")
            function: dict[str, Any] = part["function"]
            calls.append((name + (function.get("name") or ""), arguments + (function.get("arguments") or "")))
    return text, calls, reason


async def response(node: Node, limit: int) -> Answer:
    status, reply = await node.post("/v1/responses", {**RESPONSES, "max_output_tokens": limit})
    assert status == 200, reply
    text = "".join(part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"])
    items = [item for item in reply["output"] if item["type"] == "function_call"]
    complete = [item for item in items if item["status"] == "completed"]
    reason = "length" if reply["status"] == "incomplete" else "tool_calls" if complete else "stop"
    return text, [(item["name"], item["arguments"]) for item in (items if reason == "length" else complete)], reason


@pytest.mark.parametrize("format_name", daily({*FORMATS} - SIMILAR_FORMATS, FORMATS))
async def test_cut_off_or_damaged_tool_calls_become_valid_calls_or_text(format_name: str) -> None:
    known, random = TOOL_CALL_FORMATS[PARSERS.get(format_name, format_name)], Random(format_name)
    tokenizer = byte_tokenizer(*sorted(known.markers))
    text = ""

    async def script(request: Generate, say: Say) -> None:
        tokens = [*tokenizer.encode(text), END]
        cut = len(tokens) > request.max_tokens
        say(tokens=tokens[: request.max_tokens], finish="length" if cut else "stop", timing=TIMING)

    remaining = outputs(format_name, random, COUNT)
    while remaining:  # a server has a time limit
        batch, remaining = remaining[:3], remaining[3:]
        async with serve(script, AGENT_TEMPLATE, tokenizer=tokenizer, context=1 << 15) as node:
            node.model.text.output_format.tool_call_format = known
            for output in batch:
                for text, limit in (
                    (output.text, WHOLE),
                    (output.text[: random.randrange(1, len(output.text))], WHOLE),
                    (output.text, random.randrange(1, len(tokenizer.encode(output.text)))),
                ):
                    answers = [await ask(node, limit) for ask in (complete_chat, streamed_chat, response)]
                    assert answers[0] == answers[1], text
                    for shown, calls, reason in answers:
                        markers = (*known.markers, *known.openers, *known.closers)
                        leaks = [marker for marker in markers if marker in shown]
                        assert not leaks or (reason == "stop" and text.endswith(shown)), (text, shown)
                        if reason == "tool_calls":
                            values = [json.loads(arguments) for _, arguments in calls]
                            assert values and all(isinstance(value, dict) for value in values), text
                        if (text, limit) == (output.text, WHOLE):
                            read = [(name, json.loads(arguments)) for name, arguments in calls]
                            assert (read, reason) == (output.calls, "tool_calls"), text
