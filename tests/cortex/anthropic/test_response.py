"""Whole answers of nodes, as messages."""

import json
from typing import Any

import orjson
import pytest
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st

from cortex.anthropic import sdk
from cortex.anthropic.openai_stream import DONE, calls, delta, finish, usage
from helexa.core.errors import ApiError
from helexa.cortex.anthropic.responses.response import to_message
from helexa.cortex.anthropic.responses.stream import MessageStream

COUNTED = {"prompt_tokens": 7, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}}


def chat(message: Any, reason: Any = "stop", **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": message, "finish_reason": reason, **fields}], "usage": COUNTED}


def call(name: str, arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answered(message: Any, reason: Any = "stop", **fields: Any) -> dict[str, Any]:
    answer = to_message(chat(message, reason, **fields), "small", message_id="msg_1", stop_sequences=["END"])
    Message.model_validate(answer)
    return answer


def test_a_message_says_what_the_node_said() -> None:
    said = {"content": "Hello", "reasoning_content": "Hm", "tool_calls": [call("f", '{"a": [1]}'), call("g", "", "c2")]}
    assert answered(said, "tool_calls") == {
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
def test_a_call_that_cannot_be_made_comes_as_text(arguments: str) -> None:
    answer = answered({"content": None, "tool_calls": [call("Bash", arguments)]}, "tool_calls")
    (block,) = answer["content"]
    assert orjson.loads(block["text"]) == {"name": "Bash", "arguments": arguments}
    assert answer["stop_reason"] == "end_turn"


def test_why_it_stopped() -> None:
    said = {"content": "x"}
    assert answered(said, "length")["stop_reason"] == "max_tokens"
    assert answered({"tool_calls": [call("f", "{}")]}, "stop")["stop_reason"] == "tool_use"
    assert answered(said, "stop", stop_reason="END")["stop_sequence"] == "END"
    assert answered(said, "stop", stop_reason="other")["stop_reason"] == "end_turn"
    assert answered({"content": ""})["content"] == [{"type": "text", "text": "", "citations": None}]


@pytest.mark.parametrize("said", [{}, {"choices": []}, {"choices": [{}]}, {"choices": [5]}, {"choices": {"a": 1}}])
def test_an_answer_without_a_message_is_malformed(said: Any) -> None:
    with pytest.raises(ApiError) as refused:
        to_message(said, "m", message_id="msg_1")
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
def test_streamed_or_whole_the_message_is_the_same(said: dict[str, Any], reason: str) -> None:
    for index, one in enumerate(said.get("tool_calls", [])):
        one |= {"id": f"c{index}", "index": index}
    stream = MessageStream("small", "msg_1")
    texts = {name: text for name, text in said.items() if name != "tool_calls"}
    sent = stream.feed(delta(**texts) + calls(*said.get("tool_calls", [])) + finish(reason))
    sent += stream.feed(usage(7, 9, prompt_tokens_details={"cached_tokens": 3}) + DONE)
    streamed = sdk.message(sent)
    assert streamed == Message.model_validate(answered(said, reason))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=5,
)
NAMES = ["choices", "message", "content", "tool_calls", "function", "name", "arguments", "usage", "finish_reason", "id"]
ANSWERS = st.recursive(
    JSON,
    lambda children: st.lists(children, max_size=2) | st.dictionaries(st.sampled_from(NAMES), children, max_size=5),
    max_leaves=12,
)


@given(st.fixed_dictionaries({"message": st.dictionaries(st.sampled_from(NAMES), ANSWERS)}, optional={"usage": JSON}))
def test_whatever_a_node_answers_it_is_a_message_or_an_error(choice: dict[str, Any]) -> None:
    try:
        answer = to_message({"choices": [choice], "usage": choice.get("usage")}, "m", message_id="msg_1")
    except ApiError as error:
        assert error.code == "upstream_malformed_response"
    else:
        assert Message.model_validate(orjson.loads(orjson.dumps(answer))).content
