"""Recorded requests of real agents, sent through the gateway to a node: none is rejected, no text is lost."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from clients.coding_agents.recorded_requests import FOLDER, requests
from clients.scripted_stack import MODEL, SayingStack, saying_stack

REQUESTS = [
    pytest.param(request, id=f"{path.stem}-{number}")
    for path in sorted(FOLDER.glob("*.json"))
    for number, request in enumerate(requests(path.stem))
]


@pytest.fixture
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SayingStack]:
    async with saying_stack(tmp_path_factory.mktemp("saying")) as stack:
        yield stack


@pytest.mark.parametrize("request_", REQUESTS)
async def test_recorded_request_of_an_agent_is_rendered_completely_in_the_prompt(
    stack: SayingStack, request_: dict[str, Any]
) -> None:
    body = request_["body"] | {"model": MODEL}
    async with (
        aiohttp.ClientSession() as session,
        session.post(stack.url + request_["path"], json=body, headers=request_["headers"]) as response,
    ):
        text = await response.text()
        content_type = response.content_type
    assert response.status == 200, text
    assert content_type == "text/event-stream" and '"error":{' not in text
    (received,) = stack.received_requests()
    missing = [text for text in _texts(body) if text not in received["prompt"]]
    assert missing == []


def _texts(body: dict[str, Any]) -> Iterator[str]:
    """Yield the texts that the model must see: names and descriptions of tools, and all text of the conversation."""
    for tool in body.get("tools") or ():
        yield from _tool_texts(tool.get("function") or tool)
    for system in body.get("system") or ():
        if not system["text"].startswith("x-anthropic-billing-header"):
            yield system["text"]
    for turn in body.get("messages") or body["input"]:
        yield from _turn_texts(turn)


def _tool_texts(tool: dict[str, Any]) -> Iterator[str]:
    if tool.get("type") == "namespace":
        for inner in tool["tools"]:
            yield from _tool_texts(inner)
    elif "name" in tool:  # a tool without a name runs on a server, not at the client
        yield f'{tool["name"]}"'
        yield json.dumps(tool["description"], ensure_ascii=False)[1:-1]


def _turn_texts(turn: dict[str, Any]) -> Iterator[str]:
    if turn.get("type") == "reasoning":
        yield from (part["text"] for part in turn["summary"])
    if "reasoning_content" in turn:
        yield turn["reasoning_content"]
    for call in turn.get("tool_calls") or ([turn] if turn.get("type") == "function_call" else ()):
        function = call.get("function") or call
        yield f'"{function["name"]}"'
        yield from _argument_texts(json.loads(function["arguments"]))
    content = turn.get("content", turn.get("output"))
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        yield from _part_texts(part)


def _part_texts(part: dict[str, Any]) -> Iterator[str]:
    match part["type"]:
        case "thinking":
            yield part["thinking"]
        case "tool_use":
            yield f'"{part["name"]}"'
            yield from _argument_texts(part["input"])
        case "tool_result":
            yield part["content"]
        case _:
            yield part["text"]


def _argument_texts(arguments: dict[str, str]) -> Iterator[str]:
    for name, value in arguments.items():
        yield f"{json.dumps(name)}: {json.dumps(value)}"
