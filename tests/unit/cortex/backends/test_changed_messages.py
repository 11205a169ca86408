"""A backend that refuses the form of a chat request gets another form, also in later requests."""

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from aiohttp import web

from cortex.fake_node import CHOICE, USAGE, FakeNode
from cortex.running_gateway import running_cortex
from helexa.cortex.backends.chat_request import for_backend
from helexa.cortex.backends.refused_messages_and_calls import (
    refuses_parts,
    requires_reasoning,
    with_plain_texts,
    with_reasoning,
)

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "tools": [TOOL],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00001", "content": "r"},
    ],
}
MESSAGES: dict[str, Any] = {
    "max_tokens": 9,
    "temperature": 0.5,
    "top_p": 0.9,
    "output_config": {"effort": "high"},
    "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
    "messages": [
        {"role": "user", "content": CHAT["messages"][0]["content"]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call00001", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call00001", "content": "r"}]},
    ],
}
PATHS = {"/v1/chat/completions": CHAT, "/v1/messages": MESSAGES}


def has_reasoning(body: dict[str, Any]) -> bool:
    return all(message.get("reasoning_content") for message in body["messages"] if message["role"] == "assistant")


def has_texts(body: dict[str, Any]) -> bool:
    return not any(isinstance(message["content"], list) for message in body["messages"])


def has_no_effort(body: dict[str, Any]) -> bool:
    return body.get("reasoning_effort") == "none"


def has_no_sampling(body: dict[str, Any]) -> bool:
    return "temperature" not in body and "top_p" not in body


DEEPSEEK = "The `reasoning_content` in the thinking mode must be passed back to the API."
SEQUENCE = (
    "Failed to deserialize the JSON body into the target type: messages[0]: invalid type: sequence, expected a string"
    " at line 1 column 9"
)
EFFORT = (
    "Function tools with reasoning_effort are not supported for gpt-5.6-luna in /v1/chat/completions. To use function"
    " tools, use /v1/responses or set reasoning_effort to 'none'."
)
TEMPERATURE = "Unsupported value: 'temperature' does not support 0.5 with this model. Only the default (1) value is"
TEMPERATURE += " supported. `top_p` is deprecated for this model."


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("accepts", "text", "status"),
    [
        (has_reasoning, DEEPSEEK, 400),
        (has_texts, SEQUENCE, 422),
        (has_texts, "Internal server error: sequence item 0: expected str instance, list found", 500),
        (has_no_effort, EFFORT, 400),
        (has_no_sampling, TEMPERATURE, 400),
    ],
    ids=["DeepSeek's reasoning", "DeepSeek's content", "content in a template", "effort of OpenAI", "temperature"],
)
async def test_request_is_repeated_in_the_message_form_that_the_backend_accepts(
    path: str, accepts: Callable[[dict[str, Any]], bool], text: str, status: int
) -> None:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        if accepts(await request.json()):
            return web.json_response({"id": "c1", "choices": [CHOICE], "usage": USAGE})
        return web.json_response({"error": {"message": text, "type": "invalid_request_error"}}, status=status)

    async with FakeNode(speak=speak).holds("Org/M").serving() as backend:
        settings: dict[str, Any] = {"neurons": [{"name": "n1", "endpoint": backend.url, "kind": "openai"}]}
        async with running_cortex(backend, settings=settings) as cortex:
            for _ in range(2):
                backend.bodies.clear()
                async with cortex.client.post(cortex.url + path, json={"model": "Org/M"} | PATHS[path]) as response:
                    assert response.status == 200, await response.text()
    assert len(backend.bodies) == 1, "the gateway learns from refusals"
    messages = orjson.loads(backend.bodies[0])["messages"]
    shown = messages[0]["content"]
    assert (shown if isinstance(shown, str) else "\n".join(part["text"] for part in shown)) == "Hi\nthere"


async def test_reasoning_effort_set_by_a_chat_client_is_not_changed() -> None:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": EFFORT, "type": "invalid_request_error"}}, status=400)

    async with FakeNode(speak=speak).holds("Org/M").serving() as backend:
        settings: dict[str, Any] = {"neurons": [{"name": "n1", "endpoint": backend.url, "kind": "openai"}]}
        async with running_cortex(backend, settings=settings) as cortex:
            body = {"model": "Org/M", "reasoning_effort": "high"} | CHAT
            async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body) as response:
                assert response.status == 400
    assert {orjson.loads(body)["reasoning_effort"] for body in backend.bodies} == {"high"}


@pytest.mark.parametrize("fields", [{}, {"tools": []}])
def test_tool_choice_without_tools_is_omitted(fields: dict[str, Any]) -> None:
    """Codex always sends `tool_choice`, also in a request without tools, which vLLM rejects."""
    body = {"messages": [], "tool_choice": "auto", "parallel_tool_calls": True} | fields
    assert orjson.loads(for_backend(orjson.dumps(body), ())) == {"messages": []}


def test_reasoning_added_to_assistant_messages_differs_for_each_message() -> None:
    calls = [{"role": "assistant", "tool_calls": [CALL | {"id": id}]} for id in ("a", "b")]
    kept = {"role": "assistant", "content": "x", "reasoning_content": "Hm"}
    body = orjson.dumps({"messages": [*calls, kept, {"role": "assistant", "content": "y"}]})
    sent = orjson.loads(with_reasoning(body))["messages"]
    assert [message["reasoning_content"] for message in sent] == ["a", "b", "Hm", " "]


def test_message_content_with_images_is_not_merged_into_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}, {"role": "user", "content": []}]
    body = orjson.dumps({"messages": messages})
    assert orjson.loads(with_plain_texts(body))["messages"] == messages


@pytest.mark.parametrize(
    "text",
    [
        DEEPSEEK,
        "Missing `reasoning_content` field in the assistant message at message index 2.",
        "thinking is enabled but reasoning_content is missing in assistant tool call message at index 4",
        "messages with tool_calls must include reasoning_content",
    ],
)
def test_backend_errors_about_missing_reasoning_are_recognized(text: str) -> None:
    assert requires_reasoning(orjson.dumps({"message": text}))


def test_other_backend_errors_do_not_change_the_messages() -> None:
    error = b'{"loc": ["body", "messages", 1, "reasoning_content"], "msg": "Extra inputs are not permitted"}'
    assert not requires_reasoning(error)
    assert not refuses_parts(b"max_tokens: invalid type: string, expected an integer")
