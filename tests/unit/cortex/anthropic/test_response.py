"""Translation of non-streaming chat completions into messages."""

import json
from typing import Any

import orjson
import pytest
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st

from cortex.anthropic import sse_events
from cortex.anthropic.openai_stream import DONE, calls, delta, finish, usage
from helexa.core.errors import ApiError
from helexa.cortex.anthropic.message_and_errors import as_json, to_message
from helexa.cortex.anthropic.reply import MessageStream

COUNTED = {"prompt_tokens": 7, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}}


def chat(message: Any, reason: Any = "stop", **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": message, "finish_reason": reason, **fields}], "usage": COUNTED}


def call(name: str, arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def translated(message: Any, reason: Any = "stop", **fields: Any) -> dict[str, Any]:
    message = to_message(chat(message, reason, **fields), "small", message_id="msg_1", stop_sequences=["END"])
    Message.model_validate(message)
    return message


def test_chat_completion_becomes_an_anthropic_message() -> None:
    completion = {
        "content": "Hello",
        "reasoning_content": "Hm",
        "tool_calls": [call("f", '{"a": [1]}'), call("g", "", "c2")],
    }
    assert translated(completion, "tool_calls") == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "small",
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "unsigned"},
            {"type": "text", "text": "Hello", "citations": None},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": [1]}},
            {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 9,
            "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0},
            "service_tier": "standard",
        },
    }


@pytest.mark.parametrize("arguments", ["ls -l", '{"a": ', "[1]", "null", '"x"', "{} {}"])
def test_tool_call_with_invalid_arguments_becomes_text(arguments: str) -> None:
    message = translated({"content": None, "tool_calls": [call("Bash", arguments)]}, "tool_calls")
    (block,) = message["content"]
    assert orjson.loads(block["text"]) == {"name": "Bash", "arguments": arguments}
    assert message["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (r'{"p": "\ud83d x"}', "\ufffd x"),
        (r'{"p": "\uDE00"}', "\ufffd"),
        (r'{"p": "\ud83d\ude00 \\ud83d"}', "\U0001f600 \\ud83d"),
        (json.dumps(r'{"p": "\ud83d x"}'), "\ufffd x"),
    ],
)
def test_half_of_a_surrogate_pair_in_arguments_is_replaced(arguments: str, value: str) -> None:
    # Small models write such escapes in place of an emoji. A message cannot contain them.
    message = translated({"content": None, "tool_calls": [call("f", arguments)]}, "tool_calls")
    (block,) = json.loads(as_json(message))["content"]
    assert block["input"] == {"p": value}


@pytest.mark.parametrize("number", [-(2**63) - 1, 2**64, 10**30])
def test_tool_call_keeps_integers_of_more_than_64_bits(number: int) -> None:
    message = translated({"content": None, "tool_calls": [call("f", json.dumps({"n": number}))]}, "tool_calls")
    assert json.loads(as_json(message))["content"][0]["input"] == {"n": number}


def test_deeply_nested_value_with_an_integer_of_more_than_64_bits_is_malformed() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ApiError, match="nested too deeply") as error:
        as_json([2**64, nested])
    assert error.value.status == 502


def test_finish_reason_of_a_completion_becomes_a_stop_reason() -> None:
    completion = {"content": "x"}
    assert translated(completion, "length")["stop_reason"] == "max_tokens"
    assert translated({"tool_calls": [call("f", "{}")]}, "stop")["stop_reason"] == "tool_use"
    assert translated(completion, "stop", stop_reason="END")["stop_sequence"] == "END"
    assert translated(completion, "stop", stop_reason="other")["stop_reason"] == "end_turn"
    assert translated({"content": ""})["content"] == [{"type": "text", "text": "", "citations": None}]


@pytest.mark.parametrize(
    "completion", [{}, {"choices": []}, {"choices": [{}]}, {"choices": [5]}, {"choices": {"a": 1}}]
)
def test_chat_completion_without_a_message_is_502(completion: Any) -> None:
    with pytest.raises(ApiError) as refused:
        to_message(completion, "m", message_id="msg_1")
    assert (refused.value.status, refused.value.code) == (502, "upstream_malformed_response")


TEXTS = st.none() | st.text(max_size=5)
ARGUMENTS = st.one_of(
    st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2).map(json.dumps),
    st.sampled_from(["", "ls", "[1]"]),
)
MESSAGES = st.fixed_dictionaries(
    {"content": TEXTS, "reasoning_content": TEXTS},
    optional={"tool_calls": st.lists(st.builds(call, st.sampled_from("fg"), ARGUMENTS), max_size=3)},
)


@given(MESSAGES, st.sampled_from(["stop", "tool_calls", "length", "content_filter"]))
def test_streamed_and_non_streaming_messages_are_equal(completion: dict[str, Any], reason: str) -> None:
    for index, tool_call in enumerate(completion.get("tool_calls", [])):
        tool_call |= {"id": f"c{index}", "index": index}
    stream = MessageStream("small", "msg_1")
    texts = {name: text for name, text in completion.items() if name != "tool_calls"}
    sent = stream.feed(delta(**texts) + calls(*completion.get("tool_calls", [])) + finish(reason))
    sent += stream.feed(usage(7, 9, prompt_tokens_details={"cached_tokens": 3}) + DONE)
    streamed = sse_events.message(sent)
    assert streamed == Message.model_validate(translated(completion, reason))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=5,
)
NAMES = ["choices", "message", "content", "tool_calls", "function", "name", "arguments", "usage", "finish_reason", "id"]
VALUES = st.recursive(
    JSON,
    lambda children: st.lists(children, max_size=2) | st.dictionaries(st.sampled_from(NAMES), children, max_size=5),
    max_leaves=12,
)


@given(st.fixed_dictionaries({"message": st.dictionaries(st.sampled_from(NAMES), VALUES)}, optional={"usage": JSON}))
def test_any_chat_completion_becomes_a_message_or_an_error(choice: dict[str, Any]) -> None:
    try:
        message = to_message({"choices": [choice], "usage": choice.get("usage")}, "m", message_id="msg_1")
    except ApiError as error:
        assert error.code == "upstream_malformed_response"
    else:
        assert Message.model_validate(orjson.loads(orjson.dumps(message))).content
