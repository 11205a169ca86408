"""Scripted responses of a fake node, and Anthropic's client for a gateway."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
from aiohttp import web

from cortex.anthropic.claude_code import BASH, READ
from cortex.anthropic.openai_stream import (
    CACHED,
    DONE,
    KEEP_ALIVE,
    call_delta,
    calls,
    delta,
    finish,
    text_chunk,
    thinking_chunk,
    usage,
)
from cortex.fake_node import FakeNode, Speak, begin
from cortex.running_gateway import Cortex

HI: list[Any] = [{"role": "user", "content": "Hi"}]
ASK: dict[str, Any] = {"model": "small", "max_tokens": 64, "messages": HI}
TOOLS: list[Any] = [BASH, READ]
STREAM = [
    delta(role="assistant", content=""),
    KEEP_ALIVE,
    thinking_chunk("They "),
    thinking_chunk("greet."),
    text_chunk("Hel"),
    text_chunk("lo é"),
    calls(call_delta(0, "", name="Bash", id="call_1")),
    calls(call_delta(0, '{"command":')),
    calls(call_delta(1, '{"file_path": "/a"}', name="Read", id="call_2")),
    calls(call_delta(0, ' "ls"}')),
    finish("tool_calls"),
    usage(7, 9, **CACHED),
    DONE,
]
CONTENT = [
    {"type": "thinking", "thinking": "They greet.", "signature": "unsigned"},
    {"type": "text", "text": "Hello é", "citations": None},
    {"type": "tool_use", "id": "call_1", "name": "Bash", "input": {"command": "ls"}},
    {"type": "tool_use", "id": "call_2", "name": "Read", "input": {"file_path": "/a"}},
]
USAGE = {
    "input_tokens": 4,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 3,
    "output_tokens": 9,
    "output_tokens_details": {"thinking_tokens": 1},
    "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0},
    "service_tier": "standard",
}
COMPLETION: dict[str, Any] = {
    "id": "c1",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": "Hello é",
                "reasoning_content": "They greet.",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "Bash", "arguments": '{"command": "ls"}'},
                    },
                    {
                        "id": "call_2",
                        "type": "function",
                        "function": {"name": "Read", "arguments": {"file_path": "/a"}},
                    },
                ],
            },
        }
    ],
    "usage": {"prompt_tokens": 7, "completion_tokens": 9, **CACHED},
}


@asynccontextmanager
async def talking(cortex: Cortex, secret: str = "any") -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Connect Anthropic's client, without retries, so that tests see every failure."""
    options: dict[str, Any] = {"base_url": cortex.url, "api_key": secret, "max_retries": 0}
    http = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    async with anthropic.AsyncAnthropic(http_client=http, **options) as client:
        yield client


def error_type(error: anthropic.APIStatusError) -> str:
    body: Any = error.body
    assert body["type"] == "error"
    return body["error"]["type"]


def streams(*chunks: bytes) -> Speak:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return await begin(request, *chunks)

    return speak


def responds(body: Any, status: int = 200, **headers: str) -> Speak:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(text=text, status=status, content_type="application/json", headers=headers)

    return speak
