"""A backend with a Mistral model gets ids of tool calls in Mistral's format."""

import re
from typing import Any

import orjson
import pytest
from aiohttp import web

from cortex.fake_node import CHOICE, USAGE, FakeNode
from cortex.running_gateway import running_cortex
from helexa.cortex.backends.refused_messages_and_calls import refuses_ids, with_short_ids

ERRORS = [
    "Jinja Exception: Tool call IDs should be alphanumeric strings with length 9!",
    "Tool call id was toolu_01A09q90qw90lq917835lq9 but must be a-z, A-Z, 0-9, with a length of 9.",
    "Invalid 'messages[2].tool_calls[0].id': string too long. Expected a string with maximum length 40, but got a"
    " string with length 43 instead.",
    "Invalid 'messages[3].tool_call_id': string too long. Expected a string with maximum length 40, but got a string"
    " with length 46 instead.",
    "messages.5.content.0.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'",
    "1 validation error detected: Value 'functions.Bash:0' at 'messages.2.member.content.1.member.toolUse.toolUseId'"
    " failed to satisfy constraint: Member must satisfy regular expression pattern: [a-zA-Z0-9_-]+",
]


def turns(*ids: str) -> list[dict[str, Any]]:
    calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id in ids]
    results = [{"role": "tool", "tool_call_id": id, "content": f"result of {id}"} for id in reversed(ids)]
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def ids_of(body: bytes) -> tuple[list[str], list[str]]:
    """Return the ids of the calls and of the results in a request."""
    messages = orjson.loads(body)["messages"]
    calls = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    return calls, [message["tool_call_id"] for message in messages if message["role"] == "tool"]


def refusing(text: str, pattern: str) -> Any:
    """Answer like a server that accepts only ids with the pattern: llama.cpp's with a Mistral template, and others."""

    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        calls, results = ids_of(await request.read())
        if all(re.fullmatch(pattern, id) for id in (*calls, *results)):
            return web.json_response({"id": "c1", "choices": [CHOICE], "usage": USAGE})
        return web.json_response({"error": {"code": 400, "message": text, "type": "invalid_request_error"}}, status=400)

    return speak


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("id", "text", "pattern"),
    [
        ("toolu_01A09q90qw", ERRORS[0], "[a-zA-Z0-9]{9}"),
        ("chatcmpl-tool-0123456789abcdef0123456789abcdef", ERRORS[2], ".{1,40}"),
        ("functions.Bash:0", ERRORS[4], "[a-zA-Z0-9_-]+"),
    ],
    ids=["Mistral", "OpenAI", "Anthropic"],
)
async def test_tool_call_ids_that_the_backend_rejects_are_sent_in_mistrals_format(
    path: str, id: str, text: str, pattern: str
) -> None:
    use = {"type": "tool_use", "id": id, "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": id, "content": "r"}
    messages: Any = turns(id)
    if path == "/v1/messages":
        messages = [messages[0], {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    body = {"model": "Org/M", "max_tokens": 9, "messages": messages}
    async with FakeNode(speak=refusing(text, pattern)).holds("Org/M").serving() as backend:
        settings: dict[str, Any] = {"neurons": [{"name": "n1", "endpoint": backend.url, "kind": "openai"}]}
        async with running_cortex(backend, settings=settings) as cortex:
            for _ in range(2):
                async with cortex.client.post(cortex.url + path, json=body) as response:
                    assert response.status == 200, await response.text()
    assert len(backend.bodies) == 3, "the gateway learns the format from one refusal"
    assert ids_of(backend.bodies[1]) == ids_of(backend.bodies[2])


def test_shortened_ids_of_tool_calls_and_results_match() -> None:
    body = orjson.dumps({"messages": turns("toolu_1", "call00001", "toolu_2", 'a"}] é')})
    calls, results = ids_of(with_short_ids(body))
    assert calls == results[::-1]
    assert calls[1] == "call00001"
    assert len(set(calls)) == 4


@pytest.mark.parametrize("text", ERRORS)
def test_backend_errors_about_tool_call_ids_are_recognized(text: str) -> None:
    assert refuses_ids(orjson.dumps({"message": text}))


def test_other_backend_errors_about_tool_calls_are_not_taken_for_errors_about_ids() -> None:
    assert not refuses_ids(b'{"message": "Not the same number of function calls and responses"}')
    assert not refuses_ids(b'{"message": "tool call id call_1 was not found"}')
