"""Anthropic's own client, through a real gateway, to a scripted node."""

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import ModelInfo
from pydantic import TypeAdapter

from cortex.anthropic import sdk
from cortex.anthropic.claude_code import REQUEST
from cortex.anthropic.openai_stream import (
    DONE,
    finish,
    said,
)
from cortex.anthropic.talk import ASK, CONTENT, HI, STREAM, TOOLS, USAGE, WHOLE, replies, says
from cortex.fake_node import FakeNode, die_within_json
from cortex.running import Cortex


async def test_a_whole_message(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    node.speak = replies(WHOLE)
    message = await client.messages.create(**ASK, tools=TOOLS)
    assert [block.to_dict() for block in message.content] == CONTENT
    assert (message.model, message.stop_reason, message.role) == ("small", "tool_use", "assistant")
    assert message.usage.to_dict() == USAGE
    assert message.id.startswith("msg_")
    assert message._request_id
    asked = json.loads(node.bodies[0])
    assert (asked["model"], asked["messages"], asked["max_tokens"]) == ("Org/M", HI, 64)
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["Bash", "Read"]


async def test_a_streamed_message(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    node.speak = says(*STREAM)
    async with client.messages.stream(**ASK, tools=TOOLS) as stream:
        events = [event async for event in stream]
        message = await stream.get_final_message()
    assert [block.to_dict() for block in message.content] == CONTENT
    assert (message.model, message.stop_reason) == ("small", "tool_use")
    assert message.usage.to_dict() == USAGE
    assert [event.text for event in events if event.type == "text"] == ["Hel", "lo é"]
    assert [event.thinking for event in events if event.type == "thinking"] == ["They ", "greet."]
    assert json.loads(node.bodies[0])["stream_options"] == {"include_usage": True}


async def test_raw_events(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    node.speak = says(*STREAM)
    events = [event.type async for event in await client.messages.create(**ASK, stream=True)]
    assert events[0] == "message_start" and events[-2:] == ["message_delta", "message_stop"]
    assert events.count("content_block_start") == events.count("content_block_stop") == 4


async def test_the_bytes_are_pings_and_events_in_order(node: FakeNode, cortex: Cortex) -> None:
    node.speak = says(*STREAM)
    async with cortex.client.post(f"{cortex.url}/v1/messages", json=ASK | {"stream": True}) as response:
        assert response.content_type == "text/event-stream"
        assert "content-length" not in response.headers
        assert response.headers["request-id"] == response.headers["x-request-id"]
        raw = await response.read()
    sdk.check_order(sdk.parsed(raw))
    assert raw.count(b"event: ping\n") == 2


async def test_a_turn_with_images_and_results_reaches_the_node(
    node: FakeNode, client: anthropic.AsyncAnthropic
) -> None:
    node.speak = replies(WHOLE)
    pixel: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": "R0lGOD"}}
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
    asked = json.loads(node.bodies[-1])
    _, assistant, listing, picture, question = asked["messages"]
    assert assistant["reasoning_content"] == "They greet."
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [
        {"command": "ls"},
        {"file_path": "/a"},
    ]
    assert listing == {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"}
    assert picture["content"][0]["image_url"]["url"] == "data:image/gif;base64,R0lGOD"
    assert question == {"role": "user", "content": "What is it?"}
    assert asked["stop"] == ["END"]


async def test_a_stop_sequence_is_named(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    asked = ASK | {"stop_sequences": ["END"]}
    node.speak = replies({"choices": [{"message": {"content": "x"}, "finish_reason": "stop", "stop_reason": "END"}]})
    message = await client.messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    node.speak = says(said("x"), finish("stop", stop_reason="END"), DONE)
    async with client.messages.stream(**asked) as stream:
        message = await stream.get_final_message()
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


async def test_a_request_of_claude_code_is_served(node: FakeNode, cortex: Cortex) -> None:
    node.speak = says(*STREAM)
    url = f"{cortex.url}/v1/messages?beta=true"
    async with cortex.client.post(url, json=REQUEST, headers={"anthropic-version": "2023-06-01"}) as response:
        assert response.status == 200
        message = sdk.message(await response.read())
    assert [block.to_dict() for block in message.content] == CONTENT
    assert [turn["role"] for turn in json.loads(node.bodies[0])["messages"]].count("system") == 1


# Counting


async def test_a_node_counts(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    node.speak = replies({"count": 123, "max_model_len": 4096, "tokens": list(range(123))})
    count = await client.messages.count_tokens(model="small", messages=HI, tools=TOOLS, system="s")
    assert count.input_tokens == 123
    asked = json.loads(node.bodies[0])
    assert asked["model"] == "Org/M"
    assert asked["messages"] == [{"role": "system", "content": "s"}, *HI]
    assert asked["add_generation_prompt"] is True
    assert len(asked["tools"]) == 2


async def test_where_nobody_counts_the_count_is_guessed(node: FakeNode, client: anthropic.AsyncAnthropic) -> None:
    messages: Any = [{"role": "user", "content": "x" * 392}]
    for speak in (replies("{}", 404), replies("oops"), replies({"count": "many"}), die_within_json):
        node.speak = speak
        assert (await client.messages.count_tokens(model="small", messages=messages)).input_tokens == 100


async def test_counting_is_refused_in_the_same_words(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.role"):
        await client.messages.count_tokens(model="small", messages=[{"role": "robot", "content": "x"}])  # type: ignore[typeddict-item]


async def test_the_node_of_a_stream_is_asked_for_prompt_counts(
    node: FakeNode, client: anthropic.AsyncAnthropic
) -> None:
    node.speak = says(*STREAM)
    async with client.messages.stream(**ASK) as stream:
        await stream.get_final_message()
    assert node.headers[0]["x-helexa-include-usage"] == "prompt"


MODELS = ["Org/M", "small"]


async def test_models_are_listed_in_pages(client: anthropic.AsyncAnthropic) -> None:
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
    ("query", "words"),
    [
        ({"limit": 0}, "limit: must be"),
        ({"after_id": "nobody"}, "after_id: there is no model 'nobody'"),
        ({"after_id": "small", "before_id": "small"}, "before_id: excludes"),
    ],
)
async def test_a_page_that_cannot_be_is_refused(
    client: anthropic.AsyncAnthropic, query: dict[str, Any], words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words):
        await client.models.list(**query)


async def test_the_shape_of_models_follows_the_version_header(cortex: Cortex) -> None:
    assert (await cortex.get("/v1/models"))["object"] == "list"
    async with cortex.client.get(f"{cortex.url}/v1/models", headers={"anthropic-version": "2023-06-01"}) as answer:
        assert (await answer.json()).keys() == {"data", "has_more", "first_id", "last_id"}


async def test_what_is_not_there_is_refused_in_anthropics_envelope(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.models.retrieve("nobody")
    with pytest.raises(anthropic.NotFoundError) as batches:
        await client.messages.batches.list()
    for error in (missing.value, batches.value):
        body: Any = error.body
        assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
        assert error.request_id == body["request_id"]
