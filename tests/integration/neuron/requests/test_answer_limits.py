"""Token counts of answers that end early, and thinking budgets near the output limit."""

import asyncio
from typing import Any

import pytest

from helexa.neuron.engine.ipc.messages import Generate
from neuron.scripted_engine import AGENT_TEMPLATE, END, TIMING, TOKENIZER, Say, Script, byte_tokenizer
from neuron.scripted_node import CHAT, serve

PATH = "/v1/chat/completions"
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
CHANNELS = "{# <|channel|> #}{% for message in messages %}{{ message.content }}{% endfor %}<|start|>assistant"


def in_pieces(text: str, size: int) -> Script:
    """Return a script that generates `text` and the end token, `size` tokens at a time."""

    async def script(request: Generate, say: Say) -> None:
        tokens = [*TOKENIZER.encode(text), END]
        pieces = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        for piece in pieces[:-1]:
            say(tokens=piece)
            await asyncio.sleep(0)
        say(tokens=pieces[-1], finish="stop", timing=TIMING)

    return script


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("fields", "text", "tokens"),
    [
        ({"stop": "END"}, "one END and two", len("one END")),
        ({"stop": "END"}, "one END", len("one END")),
        ({"stop": "END"}, "one", len("one") + 1),
        (
            {"tools": [{"type": "function", "function": {"name": "a"}}], "parallel_tool_calls": False},
            '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "a", "arguments": {}}',
            len('<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "a", "arguments": {'),
        ),
    ],
)
async def test_tokens_after_a_stop_string_or_tool_call_are_not_counted_in_the_usage(
    fields: dict[str, Any], text: str, tokens: int, size: int
) -> None:
    async with serve(in_pieces(text, size), AGENT_TEMPLATE) as node:
        status, reply = await node.post(PATH, {**CHAT, **fields})
        assert status == 200, reply
        assert reply["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize("limit", [40, *range(60, 70), 100])
async def test_tokens_that_end_the_reasoning_at_its_budget_count_toward_max_tokens(limit: int) -> None:
    """The model writes text, then reasons without end. The tokens that close the reasoning count toward the limit."""
    tokenizer = byte_tokenizer(*HARMONY)
    closing = tokenizer.encode("<|end|><|start|>assistant<|channel|>final<|message|>")
    beginning = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>analysis<|message|>"

    async def script(request: Generate, say: Say) -> None:
        ended = request.prompt[-len(closing) :] == closing
        tokens = tokenizer.encode("answer" * 20 if ended else beginning + "hm " * 100)
        for token in tokens[: request.max_tokens - 1]:
            say(tokens=[token])
            await asyncio.sleep(0)
        say(tokens=[tokens[request.max_tokens - 1]], finish="length", timing=TIMING)

    async with serve(script, CHANNELS, tokenizer=tokenizer) as node:
        status, reply = await node.post(PATH, {**CHAT, "thinking_budget": 3, "max_tokens": limit})
        assert status == 200, reply
        (choice,) = reply["choices"]
        assert choice["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == limit
        assert choice["message"]["content"].startswith("Let me")
        assert ("answer" in choice["message"]["content"]) == (limit > 70)
