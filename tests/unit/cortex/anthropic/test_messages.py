"""Anthropic's client through a real gateway to a fake node."""

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import ModelInfo
from pydantic import TypeAdapter

from cortex.anthropic import sse_events
from cortex.anthropic.claude_code import REQUEST
from cortex.anthropic.conversation_node import ASK, COMPLETION, CONTENT, HI, STREAM, TOOLS, USAGE, responds, streams
from cortex.anthropic.openai_stream import (
    DONE,
    finish,
    text_chunk,
)
from cortex.fake_node import FakeNode, die_within_json
from cortex.running_gateway import Cortex


async def test_request_and_response_of_a_message_are_translated(
    node: FakeNode, client: anthropic.AsyncAnthropic
) -> None:
    node.speak = responds(COMPLETION)
    message = await client.messages.create(**ASK, tools=TOOLS)
    assert [block.to_dict() for block in message.content] == CONTENT
    assert (message.model, message.stop_reason, message.role) == ("small", "tool_use", "assistant")
    assert message.usage.to_dict() == USAGE
    assert message.id.startswith("msg_")
    assert message._request_id
    chat_request = json.loads(node.bodies[0])
    assert (chat_request["model"], chat_request["messages"], chat_request["max_tokens"]) == ("Org/M", HI, 64)
    assert [tool["function"]["name"] for tool in chat_request["tools"]] == ["Bash", "Read"]


async def test_streamed_message_has_text_tool_call_and_usage(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    node.speak = streams(*STREAM)
    async with client.messages.stream(**ASK, tools=TOOLS) as stream:
        events = [event async for event in stream]
        message = await stream.get_final_message()
    assert [block.to_dict() for block in message.content] == CONTENT
    assert (message.model, message.stop_reason) == ("small", "tool_use")
    assert message.usage.to_dict() == USAGE
    assert [event.text for event in events if event.type == "text"] == ["Hel", "lo é"]
    assert [event.thinking for event in events if event.type == "thinking"] == ["They ", "greet."]
    assert json.loads(node.bodies[0])["stream_options"] == {"include_usage": True}


async def test_each_content_block_of_a_messages_stream_has_a_start_and_a_stop_event(
    node: FakeNode, client: anthropic.AsyncAnthropic
) -> None:
    node.speak = streams(*STREAM)
    events = [event.type async for event in await client.messages.create(**ASK, stream=True)]
    assert events[0] == "message_start" and events[-2:] == ["message_delta", "message_stop"]
    assert events.count("content_block_start") == events.count("content_block_stop") == 4


async def test_messages_stream_has_pings_and_events_in_anthropics_order(node: FakeNode, cortex: Cortex) -> None:
    node.speak = streams(*STREAM)
    async with cortex.client.post(f"{cortex.url}/v1/messages", json=ASK | {"stream": True}) as response:
        assert response.content_type == "text/event-stream"
        assert "content-length" not in response.headers
        assert response.headers["request-id"] == response.headers["x-request-id"]
        raw = await response.read()
    sse_events.check_order(sse_events.parsed(raw))
    assert raw.count(b"event: ping\n") == 2


async def test_images_and_tool_results_reach_the_node(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    node.speak = responds(COMPLETION)
    pixel: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": "R0lGODlh"}}
    first = await client.messages.create(**ASK)
    turns = [
        *HI,
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "a.txt"},
                {"type": "tool_result", "tool_use_id": "call_2", "content": [pixel]},
                {"type": "text", "text": "What is it?"},
            ],
        },
    ]
    await client.messages.create(**ASK | {"messages": turns}, tools=TOOLS, stop_sequences=["END"])
    chat_request = json.loads(node.bodies[-1])
    _, assistant, listing, image, final_message = chat_request["messages"]
    assert assistant["reasoning_content"] == "They greet."
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [
        {"command": "ls"},
        {"file_path": "/a"},
    ]
    assert listing == {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"}
    assert image["content"][0]["image_url"]["url"] == "data:image/gif;base64,R0lGODlh"
    assert final_message == {"role": "user", "content": "What is it?"}
    assert chat_request["stop"] == ["END"]


async def test_message_that_a_stop_sequence_ended_names_the_stop_sequence(
    node: FakeNode, client: anthropic.AsyncAnthropic
) -> None:
    chat_request = ASK | {"stop_sequences": ["END"]}
    node.speak = responds({"choices": [{"message": {"content": "x"}, "finish_reason": "stop", "stop_reason": "END"}]})
    message = await client.messages.create(**chat_request)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    node.speak = streams(text_chunk("x"), finish("stop", stop_reason="END"), DONE)
    async with client.messages.stream(**chat_request) as stream:
        message = await stream.get_final_message()
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


async def test_recorded_claude_code_request_is_answered(node: FakeNode, cortex: Cortex) -> None:
    node.speak = streams(*STREAM)
    url = f"{cortex.url}/v1/messages?beta=true"
    async with cortex.client.post(url, json=REQUEST, headers={"anthropic-version": "2023-06-01"}) as response:
        assert response.status == 200
        message = sse_events.message(await response.read())
    assert [block.to_dict() for block in message.content] == CONTENT
    assert [turn["role"] for turn in json.loads(node.bodies[0])["messages"]].count("system") == 1


# Counting


async def test_count_tokens_is_answered_by_the_node(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    node.speak = responds({"count": 123, "max_model_len": 4096, "tokens": list(range(123))})
    count = await client.messages.count_tokens(model="small", messages=HI, tools=TOOLS, system="s")
    assert count.input_tokens == 123
    chat_request = json.loads(node.bodies[0])
    assert chat_request["model"] == "Org/M"
    assert chat_request["messages"] == [{"role": "system", "content": "s"}, *HI]
    assert chat_request["add_generation_prompt"] is True
    assert len(chat_request["tools"]) == 2


async def test_count_tokens_is_estimated_if_the_node_cannot_count(
    node: FakeNode, client: anthropic.AsyncAnthropic
) -> None:
    messages: Any = [{"role": "user", "content": "x" * 392}]
    for speak in (responds("{}", 404), responds("oops"), responds({"count": "many"}), die_within_json):
        node.speak = speak
        assert (await client.messages.count_tokens(model="small", messages=messages)).input_tokens == 100


async def test_invalid_count_tokens_request_gets_the_error_of_messages(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.role"):
        await client.messages.count_tokens(model="small", messages=[{"role": "robot", "content": "x"}])  # type: ignore[typeddict-item]


async def test_gateway_requests_prompt_counts_from_the_node_for_a_messages_stream(
    node: FakeNode, client: anthropic.AsyncAnthropic
) -> None:
    node.speak = streams(*STREAM)
    async with client.messages.stream(**ASK) as stream:
        await stream.get_final_message()
    assert node.headers[0]["x-helexa-include-usage"] == "prompt"


MODELS = ["Org/M", "small"]


async def test_anthropic_client_lists_models_in_pages(client: anthropic.AsyncAnthropic) -> None:
    page = await client.models.list(limit=1)
    (model,) = page.data
    TypeAdapter(ModelInfo).validate_python(model.to_dict())
    assert (model.id, model.type, model.display_name, model.created_at.year) == ("Org/M", "model", "Org/M", 1970)
    assert (page.has_more, page.first_id, page.last_id) == (True, "Org/M", "Org/M")
    assert [model.id async for model in client.models.list(limit=1)] == MODELS
    assert [model.id for model in (await client.models.list(before_id="small")).data] == ["Org/M"]
    assert (await client.models.list(after_id="small")).data == []
    assert (await client.models.retrieve("small")).id == "small"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"limit": 0}, "limit: must be"),
        ({"after_id": "nobody"}, "after_id: model 'nobody' not found"),
        ({"after_id": "small", "before_id": "small"}, "before_id: cannot be combined"),
    ],
)
async def test_invalid_page_parameter_of_the_model_list_is_rejected(
    client: anthropic.AsyncAnthropic, query: dict[str, Any], message: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message):
        await client.models.list(**query)


async def test_model_list_has_anthropics_format_if_the_anthropic_version_header_is_sent(cortex: Cortex) -> None:
    assert (await cortex.get("/v1/models"))["object"] == "list"
    async with cortex.client.get(f"{cortex.url}/v1/models", headers={"anthropic-version": "2023-06-01"}) as response:
        assert (await response.json()).keys() == {"data", "has_more", "first_id", "last_id"}


async def test_unknown_model_or_path_has_an_anthropic_error(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.models.retrieve("nobody")
    with pytest.raises(anthropic.NotFoundError) as batches:
        await client.messages.batches.list()
    for error in (missing.value, batches.value):
        body: Any = error.body
        assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
        assert error.request_id == body["request_id"]
