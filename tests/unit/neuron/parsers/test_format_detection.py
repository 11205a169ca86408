"""Detection of the tool-call format and reasoning markers from real chat templates and tokens."""

import json
import re
from typing import Any

import pytest

from helexa.neuron.parsers.formats.tool_call_format import TOOL_CALL_FORMATS, find_tool_call_format
from helexa.neuron.parsers.reasoning import find_reasoning_marks
from helexa.neuron.text.chat_template import ChatTemplate
from neuron.parsers.piecewise_parsing import TOOLS, parse_pieces, parser

FORMATS = {
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "ibm-granite-granite-4.0": "hermes",
    "MiMo-VL": "hermes",
    "Qwen3-Coder": "qwen_xml",
    "Qwen3.5-4B": "qwen_xml",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen_xml",
    "StepFun3.5-Flash": "qwen_xml",
    "GLM-4.6": "glm",
    "GLM-4.7-Flash": "glm",
    "poolside-Laguna-XS.2": "glm",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3_json",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
    "deepseek-ai-DeepSeek-V3.1": "deepseek",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek",
    "llama-cpp-deepseek-r1": "deepseek",
    "openai-gpt-oss-120b": "harmony",
    "google-gemma-2-2b-it": None,
    "google-gemma-4-31B-it": "gemma4",
    "microsoft-Phi-3.5-mini-instruct": None,
    "google-gemma-4-31B-it-interleaved": "gemma4",
    "Kimi-K2-Thinking": "kimi_k2",
    "LFM2-8B-A1B": "lfm2",
    "LFM2.5-8B-A1B": "lfm2",
    "MiniMax-M2": "minimax_m2",
    "MiniMax-M3": None,
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "cohere",
    "Cohere2MoE": "cohere",
    "CohereForAI-c4ai-command-r-plus-tool_use": "command_r",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "ibm-granite-granite-4.1": "hermes",
    "inclusionai-ling-3.0-flash": "glm",
    "unsloth-Apriel-1.5": "hunyuan",
    "ByteDance-Seed-OSS": "seed_oss",
    "moonshotai-Kimi-K2": "kimi_k2",
    "meetkai-functionary-medium-v3.2": None,
}


def no_token(_: str) -> bool:
    return False


@pytest.mark.parametrize("model", FORMATS)
def test_tool_call_format_is_detected_from_the_chat_template(templates: dict[str, str], model: str):
    tool_call_format = find_tool_call_format(no_token, templates[model])
    assert (tool_call_format and tool_call_format.name) == FORMATS[model]


def test_tool_call_format_is_detected_from_special_tokens_if_the_template_shows_none():
    for name in (
        "harmony",
        "muse_glimmer",
        "deepseek",
        "mistral",
        "hermes",
        "glm",
        "gemma4",
        "kimi_k2",
        "lfm2",
        "granite",
        "phi4_mini",
        "cohere",
    ):
        tool_call_format = find_tool_call_format(TOOL_CALL_FORMATS[name].markers.__contains__, "{{ messages }}")
        assert tool_call_format is TOOL_CALL_FORMATS[name]


@pytest.mark.parametrize(
    ("model", "mark"),
    [
        ("Qwen-Qwen3-0.6B", "<think>"),
        ("mistralai-Ministral-3-14B-Reasoning-2512", "[THINK]"),
        ("ByteDance-Seed-OSS", "<seed:think>"),
        ("GLM-4.7-Flash", "<think>"),
        ("MiniMax-M2", "<think>"),
        ("NVIDIA-Nemotron-Nano-v2", "<think>"),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "<|START_THINKING|>"),
        ("Qwen-Qwen2.5-7B-Instruct", None),
        ("openai-gpt-oss-120b", None),
    ],
)
def test_reasoning_markers_are_detected_from_the_chat_template(templates: dict[str, str], model: str, mark: str | None):
    marks = find_reasoning_marks(no_token, templates[model])
    assert (marks and marks.open) == mark


def test_special_tokens_take_precedence_over_the_template_in_format_detection():
    tokens = {"[THINK]", "[/THINK]", "<think>"}
    marks = find_reasoning_marks(tokens.__contains__, "<think></think>")
    assert marks is not None
    assert marks.open == "[THINK]"
    assert marks.opened_by("[THINK]\n")
    assert marks.opened_by("[THINK]a[/THINK][THINK]b")
    assert not marks.opened_by("[THINK][/THINK]\n\nHi")
    assert marks.closed_by("[THINK][/THINK]\n\nHi")
    assert not marks.closed_by("Hi")


ARGUMENTS = '{"city": "Paris", "days": 3, "metric": true}'
ASK: dict[str, Any] = {"role": "user", "content": "How is the weather in Paris?"}
CALL: dict[str, Any] = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": ARGUMENTS},
}
ENDS = r"<END>|<\|im_end\|>|<\|eot_id\|>|<\|end_of_text\|>|<｜end▁of▁sentence｜>|<\|call\|>|</assistant>|<seed:eos>"
ENDS += r"|<\|end\|>|\[e~\[|<turn\|>|<\|tool_response>|<SPECIAL_12>|<\|role_end\|>|<\|END_OF_TURN_TOKEN\|>"
# Models whose template renders past assistant messages in another format than the model's output, such as without the
# marker that ends the reasoning.
REFORMATTED = {"Qwen-QwQ-32B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NVIDIA-Nemotron-Nano-v2", "MiniMax-M2"}
REFORMATTED |= {"deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "GLM-4.7-Flash", "Cohere2MoE"}
REFORMATTED |= {"CohereForAI-c4ai-command-r-plus-tool_use"}
REFORMATTED |= {"google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved", "unsloth-Apriel-1.5"}
WITHOUT_CALLS = {"LFM2-8B-A1B", "ibm-granite-granite-3.3-2B-Instruct"}  # templates that omit tool calls
WITHOUT_CALLS |= {"llama-cpp-deepseek-r1"}  # a template that transformers cannot render, either


@pytest.mark.parametrize(
    "model", [model for model, format_name in FORMATS.items() if format_name and model not in WITHOUT_CALLS]
)
def test_tool_call_rendered_by_a_real_template_is_parsed_back(templates: dict[str, str], model: str):
    source = templates[model]
    tool_call_format, marks = find_tool_call_format(no_token, source), find_reasoning_marks(no_token, source)
    template = ChatTemplate(source, special_tokens={"bos_token": "<BEGIN>", "eos_token": "<END>"})
    offered = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
    for tool in offered:
        tool["function"]["description"] = "A tool."
    message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    prompt = template.render([ASK], tools=offered).rstrip()
    conversation = template.render([ASK, message], tools=offered, add_generation_prompt=False)
    assert tool_call_format is not None
    call = ("call", "get_weather", ARGUMENTS)
    if model in REFORMATTED:
        events = parse_pieces(parser(tool_call_format.name), conversation.rpartition(ASK["content"])[2])
        calls = [event for event in events if event[0] == "call"]
        assert [(kind, name, json.loads(arguments)) for kind, name, arguments in calls] == [
            ("call", "get_weather", json.loads(ARGUMENTS))
        ]
        return
    assert conversation.startswith(prompt)
    output = re.split(ENDS, conversation[len(prompt) :])[0]
    reader = parser(tool_call_format.name, in_reasoning=marks is not None and marks.opened_by(prompt))
    assert parse_pieces(reader, output) == [call]
