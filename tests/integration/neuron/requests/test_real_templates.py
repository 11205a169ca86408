"""Tool calls and reasoning in the formats of real chat templates, with a scripted engine."""

import json
import re
from typing import Any

import pytest

from neuron.grammar.random_walks import Vocabulary, matcher
from neuron.scripted_engine import answer, byte_tokenizer
from neuron.scripted_node import CHAT, serve
from nightly import cases, daily

ROOM = 1 << 16  # prompts of real templates are long if a token is a byte
PATH = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "where"}}},
    },
}
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")

# Template, control tokens, generated output, reasoning, text.
ANSWERS: dict[str, tuple[str, tuple[str, ...], str, str, str]] = {
    "harmony": (
        "openai-gpt-oss-120b",
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"place": "Köln"}<|call|>',
        "Hm.",
        "",
    ),
    "hermes": (
        "Qwen-Qwen3-0.6B",
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
        '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"place": "Köln"}}\n</tool_call>',
        "Hm.",
        "",
    ),
    "qwen_xml": (
        "Qwen3.5-4B",
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
        "Looking.\n<tool_call>\n<function=weather>\n<parameter=place>\nKöln\n</parameter>\n</function>\n</tool_call>",
        "",
        "Looking.\n",
    ),
    "mistral": (
        "mistralai-Ministral-3-14B-Reasoning-2512",
        ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
        '[THINK]Hm.[/THINK][TOOL_CALLS]weather[ARGS]{"place": "Köln"}',
        "Hm.",
        "",
    ),
    "mistral_with_ids": (
        "Mistral-Small-3.2-24B-Instruct-2506",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"place": "Köln"}',
        "",
        "",
    ),
    "gemma4": (
        "google-gemma-4-31B-it",
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"),
        '<|channel>thought\nHm.\n<channel|><|tool_call>call:weather{place:<|"|>Köln<|"|>}<tool_call|><|tool_response>',
        "Hm.",
        "",
    ),
    "glm": (
        "GLM-4.6",
        (
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
        "<think>Hm.</think>\nLooking.\n<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Köln</arg_value>\n"
        "</tool_call>",
        "Hm.",
        "Looking.\n",
    ),
    "granite": (
        "ibm-granite-granite-3.3-2B-Instruct",
        ("<|tool_call|>",),
        '<|tool_call|>[{"name": "weather", "arguments": {"place": "Köln"}}]',
        "",
        "",
    ),
    "lfm2": (
        "LFM2.5-8B-A1B",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        '<think>Hm.</think><|tool_call_start|>[weather(place="Köln")]<|tool_call_end|>',
        "Hm.",
        "",
    ),
    "minimax_m2": (
        "MiniMax-M2",
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        'Hm.\n</think>\n\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="place">Köln</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        "Hm.",
        "",
    ),
    "nemotron": (
        "NVIDIA-Nemotron-Nano-v2",
        ("<SPECIAL_12>",),
        'Hm.\n</think>\n\n<TOOLCALL>[{"name": "weather", "arguments": {"place": "Köln"}}]</TOOLCALL>',
        "Hm.",
        "",
    ),
    "cohere": (
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"place": "Köln"}}\n]'
        "<|END_ACTION|>",
        "",
        "",
    ),
    "command_r": (
        "CohereForAI-c4ai-command-r-plus-tool_use",
        (),
        'I will ask.\nAction: ```json\n[\n    {\n        "tool_name": "weather",\n        "parameters": {\n'
        '            "place": "Köln"\n        }\n    }\n]\n```',
        "",
        "I will ask.\n",
    ),
    "seed_oss": (
        "ByteDance-Seed-OSS",
        ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
        "<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=weather>\n<parameter=place>Köln</parameter>\n"
        "</function>\n</seed:tool_call>",
        "Hm.",
        "",
    ),
    "kimi_k2": (
        "moonshotai-Kimi-K2",
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"place": "Köln"}<|tool_call_end|><|tool_calls_section_end|>',
        "",
        "",
    ),
    "llama3_json": (
        "meta-llama-Llama-3.1-8B-Instruct",
        ("<|python_tag|>",),
        '{"name": "weather", "parameters": {"place": "Köln"}}',
        "",
        "",
    ),
}


NIGHTLY = ("cohere", "command_r", "minimax_m2", "nemotron", "seed_oss", "kimi_k2")


@pytest.mark.parametrize("format_name", daily(ANSWERS.keys() - NIGHTLY, ANSWERS))
async def test_tool_calls_and_reasoning_of_real_model_families_are_parsed(
    templates: dict[str, str], format_name: str
) -> None:
    template, control, output, thoughts, text = ANSWERS[format_name]
    tokenizer = byte_tokenizer(*control)
    async with serve(
        answer(output, tokenizer=tokenizer), templates[template], tokenizer=tokenizer, context=ROOM
    ) as node:
        assert (
            node.model.text.output_format.tool_call_format is not None
            and node.model.text.output_format.tool_call_format.name == format_name.removesuffix("_with_ids")
        )
        status, reply = await node.post(PATH, {**CHAT, "tools": [TOOL]})
        assert status == 200, reply
        (choice,) = reply["choices"]
        message = choice["message"]
        assert (message.get("reasoning_content", ""), message["content"]) == (thoughts, text or None)
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"place": "Köln"})
        assert choice["finish_reason"] == "tool_calls"
        assert re.fullmatch("[A-Za-z0-9]{9}" if format_name.startswith("mistral") else "call_[0-9a-f]{24}", call["id"])
        history = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
        ]
        status, reply = await node.post(PATH, {**CHAT, "tools": [TOOL], "messages": [*CHAT["messages"], *history]})
        assert status == 200, reply
        prompt = tokenizer.decode(node.engine.requests[-1].prompt, skip_special=False)
        for part in ("weather", "of a place", "place", "where", "Köln", "rain"):
            assert part in prompt


@pytest.mark.parametrize("format_name", ["gemma4", "glm", "lfm2"])
async def test_answer_cut_off_at_any_token_leaks_no_marker_and_causes_no_error(
    templates: dict[str, str], format_name: str
) -> None:
    template, control, output, _, _ = ANSWERS[format_name]
    tokenizer = byte_tokenizer(*control)
    tokens = tokenizer.encode(output)

    async def script(request: Any, say: Any) -> None:
        limit = request.max_tokens
        cut = tokenizer.decode(tokens[:limit], skip_special=False)
        await answer(cut, tokenizer=tokenizer, finish="length" if limit < len(tokens) else "stop")(request, say)

    async with serve(script, templates[template], tokenizer=tokenizer, context=ROOM) as node:
        for limit in range(1, len(tokens), cases(9, 1)):
            status, reply = await node.post(PATH, {**CHAT, "tools": [TOOL], "max_tokens": limit})
            assert status == 200, reply
            (choice,) = reply["choices"]
            shown = f"{choice['message']['content'] or ''}{choice['message'].get('reasoning_content') or ''}"
            assert choice["finish_reason"] == "length"
            assert not any(marker in shown for marker in (*control, "call:", "weather")), reply
        for tool_choice in ("none", "required", {"type": "function", "function": {"name": "weather"}}):
            status, reply = await node.post(PATH, {**CHAT, "tools": [TOOL], "tool_choice": tool_choice})
            assert status == 200, reply
            assert bool(reply["choices"][0]["message"].get("tool_calls")) == (tool_choice != "none")


async def test_reasoning_in_harmony_format_is_ended_at_the_thinking_budget(templates: dict[str, str]) -> None:
    tokenizer = byte_tokenizer(*HARMONY)
    final = "<|end|><|start|>assistant<|channel|>final<|message|>"

    async def script(request: Any, say: Any) -> None:
        ended = tokenizer.decode(request.prompt, skip_special=False).endswith(final)
        await answer("Yes." if ended else f"<|channel|>analysis<|message|>Hm, so.{final}No.", tokenizer=tokenizer)(
            request, say
        )

    async with serve(script, templates["openai-gpt-oss-120b"], tokenizer=tokenizer, context=ROOM) as node:
        for budget, thoughts, text in ((None, "Hm, so.", "No."), (3, "Hm", "Yes.")):
            status, reply = await node.post(PATH, {**CHAT, "thinking_budget": budget})
            assert status == 200, reply
            message = reply["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == (thoughts, text or None)


async def test_harmony_grammar_allows_a_tool_call_or_text_after_reasoning_was_ended(
    templates: dict[str, str],
) -> None:
    tokenizer = byte_tokenizer(*HARMONY)
    ended = "<|end|><|start|>assistant"
    thought = "<|channel|>analysis<|message|>Hm, so."
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"place": "Oslo"}'

    async def script(request: Any, say: Any) -> None:
        prompt = tokenizer.decode(request.prompt, skip_special=False)
        output = call if prompt.endswith("Hm" + ended) else f"{thought}{ended}{call}"
        await answer(output, tokenizer=tokenizer)(request, say)

    # As in the engine: control tokens of the grammar are tokens of the tokenizer.
    ids = range(tokenizer.vocab_size)
    spellings = [tokenizer.token_bytes(token, skip_special=False) for token in ids]
    special = [token for token in ids if not tokenizer.token_bytes(token)]
    vocabulary = Vocabulary(spellings, special, [tokenizer.eos_id or 0])

    def accepts(grammar: str, text: str) -> bool:
        made, tokens = matcher(vocabulary, grammar), tokenizer.encode(text)
        return made.validate_tokens(tokens) == len(tokens) and made.consume_tokens(tokens) and made.is_accepting()

    async with serve(script, templates["openai-gpt-oss-120b"], tokenizer=tokenizer, context=ROOM) as node:
        for choice, free in (("auto", True), ("required", False)):
            request_body = {**CHAT, "tools": [TOOL], "tool_choice": choice, "thinking_budget": 3}
            status, reply = await node.post(PATH, request_body)
            assert status == 200, reply
            message = reply["choices"][0]["message"]
            assert message["reasoning_content"] == "Hm"
            assert [one["function"]["arguments"] for one in message["tool_calls"]] == ['{"place": "Oslo"}']
            first, after = node.engine.requests[-2:]
            assert (first.grammar == "") == free
            assert accepts(after.grammar, call)
            assert accepts(after.grammar, "<|channel|>final<|message|>No.") == free
            assert not accepts(after.grammar, f"{thought}{ended}{call}")
        status, reply = await node.post(PATH, {**CHAT, "response_format": {"type": "json_object"}})
        assert status == 200, reply
        grammar = node.engine.requests[-1].grammar
        for head in ("final", "final <|constrain|>json"):
            assert accepts(grammar, f"{thought}{ended}<|channel|>{head}<|message|>{{}}")
            assert not accepts(grammar, f"<|channel|>{head}<|message|>No.")
