"""A backend whose chat template demands alternating roles gets consecutive messages as one."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web

from cortex.fake_node import CHOICE, USAGE, FakeNode
from cortex.running_gateway import Cortex, running_cortex
from helexa.cortex.backends.refused_messages_and_calls import refuses_order, with_alternating_roles

ERRORS = [
    "After the optional system message, conversation roles must alternate user/assistant/user/assistant/...",
    "Conversation roles must alternate user/assistant/user/assistant/...",
    "After the optional system message, conversation roles must alternate user and assistant roles except for tool "
    "calls and results.",
    "Unexpected role 'user' after role 'tool'",
    "After the (optional) system message(s), user and assistant roles should be alternating.",
    "deepseek-reasoner does not support successive user or assistant messages (messages[1] and messages[2])",
    "Please ensure that function call turn comes immediately after a user turn or after a function response turn.",
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(*ids: str, **fields: Any) -> dict[str, Any]:
    calls = [{"id": id, "type": "function", "function": {"name": f"Use{id}", "arguments": "{}"}} for id in ids]
    return {"role": "assistant", "content": None, **fields, "tool_calls": calls}


def result(id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


SYSTEM = {"role": "system", "content": "SysText"}
ANSWER = {"role": "assistant", "content": "AnsOne"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "asked again": [SYSTEM, user("UserOne"), user("UserTwo")],
    "parts": [SYSTEM, user("UserOne"), user("") | {"content": [{"type": "text", "text": "UserTwo"}]}],
    "continued answer": [user("UserOne"), ANSWER, ANSWER | {"content": "AnsTwo"}, user("UserTwo")],
    "reminder after results": [
        *(SYSTEM, user("UserOne"), call("A", "B"), result("A", "ResA"), result("B", "ResB")),
        *(user("UserTwo"), call("C", content="AnsOne"), result("C", "ResC"), user("UserThree")),
    ],
    "calls in two messages": [user("UserOne"), call("A"), call("B"), result("A", "ResA"), result("B", "ResB")],
}


async def strict(node: FakeNode, request: web.Request) -> web.StreamResponse:
    """Answer like llama.cpp's server with a Mistral template."""
    if request.path != "/v1/chat/completions":
        return web.json_response({"detail": "Not Found"}, status=404)
    roles = [message["role"] for message in (await request.json())["messages"]]
    order = re.sub("^s", "", "".join(role[0] for role in roles))
    if not re.fullmatch("(u(at+)*a)*(u(at+)*)", order):
        error = {"code": 500, "message": ERRORS[0], "type": "server_error"}
        return web.json_response({"error": error}, status=500)
    return web.json_response({"id": "c1", "choices": [CHOICE], "usage": USAGE})


@pytest.fixture
async def backend() -> AsyncIterator[FakeNode]:
    async with FakeNode(speak=strict).holds("Org/M", "Org/N").serving() as backend:
        yield backend


@asynccontextmanager
async def gateway(backend: FakeNode) -> AsyncIterator[Cortex]:
    settings = {"neurons": [{"name": "n1", "endpoint": backend.url, "kind": "openai"}]}
    async with running_cortex(backend, settings=settings) as cortex:
        yield cortex


async def post(cortex: Cortex, path: str, **fields: Any) -> int:
    async with cortex.client.post(cortex.url + path, json={"model": "Org/M", **fields}) as response:
        await response.read()
        return response.status


def words(value: Any) -> list[str]:
    return re.findall(r"(?:Sys|User|Ans|Res|Use)[A-Z]\w*", orjson.dumps(value).decode())


async def test_chat_is_repeated_in_the_role_order_that_the_backend_accepts_without_loss(backend: FakeNode) -> None:
    async with gateway(backend) as cortex:
        for messages in CHATS.values():
            assert await post(cortex, "/v1/chat/completions", messages=messages) == 200
            assert words(orjson.loads(backend.bodies[-1])["messages"]) == words(messages)
    assert len(backend.bodies) == len(CHATS) + 1, "the gateway learns the order from one refusal"


async def test_other_models_of_the_backend_get_messages_in_the_original_order(backend: FakeNode) -> None:
    messages = CHATS["reminder after results"]
    async with gateway(backend) as cortex:
        assert await post(cortex, "/v1/chat/completions", messages=messages) == 200
        await post(cortex, "/v1/chat/completions", messages=messages, model="Org/N")
    assert orjson.loads(backend.bodies[2])["messages"] == messages


async def test_messages_of_claude_code_are_reordered_for_a_strict_backend(backend: FakeNode) -> None:
    use = {"type": "tool_use", "id": "A", "name": "UseA", "input": {}}
    results = [{"type": "tool_result", "tool_use_id": "A", "content": "ResA"}, {"type": "text", "text": "UserThree"}]
    turns = [
        user("UserOne"),
        user("UserTwo"),
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": results},
    ]
    async with gateway(backend) as cortex:
        assert await post(cortex, "/v1/messages", max_tokens=9, system="SysText", messages=turns) == 200
    sent = orjson.loads(backend.bodies[-1])["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool"]
    assert sent[-1]["content"] == "ResA\n\nUserThree"


async def test_items_of_codex_are_reordered_for_a_strict_backend(backend: FakeNode) -> None:
    items = [
        {"type": "message", **user("UserOne")},
        {"type": "message", **user("UserTwo")},
        {"type": "function_call", "call_id": "A", "name": "UseA", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "A", "output": "ResA"},
        {"type": "message", **user("UserThree")},
    ]
    async with gateway(backend) as cortex:
        assert await post(cortex, "/v1/responses", instructions="SysText", input=items) == 200
    sent = orjson.loads(backend.bodies[-1])["messages"]
    assert words(sent) == ["SysText", "UserOne", "UserTwo", "UseA", "ResA", "UserThree"]


async def test_role_order_that_cannot_be_mended_returns_the_error_of_the_backend(backend: FakeNode) -> None:
    async with gateway(backend) as cortex:
        assert await post(cortex, "/v1/chat/completions", messages=[ANSWER, user("UserOne")]) == 500
    assert len(backend.bodies) == 2


@pytest.mark.parametrize("text", ERRORS)
def test_backend_errors_about_role_order_are_recognized(text: str) -> None:
    assert refuses_order(orjson.dumps({"error": {"message": text}}))


@pytest.mark.parametrize("text", ["the server is overloaded; use an alternative model", "unexpected field 'role'"])
def test_other_backend_errors_are_not_taken_for_errors_about_role_order(text: str) -> None:
    assert not refuses_order(orjson.dumps({"error": {"message": text}}))


@pytest.mark.parametrize("messages", [b"null", b'"Hi"', b"[1]", b"[[]]"])
def test_malformed_messages_are_not_reordered(messages: bytes) -> None:
    body = b'{"model":"m","messages":%b,"seed":12345678901234567890123}' % messages
    assert with_alternating_roles(body) == body


def test_reordering_of_messages_keeps_the_bytes_of_other_fields() -> None:
    body = b'{"seed":12345678901234567890123,"messages":[{"role":"user","content":"a"},{"role":"user","content":"b"}]}'
    changed = with_alternating_roles(body)
    assert b'"seed":12345678901234567890123' in changed
    assert orjson.loads(changed.replace(b"12345678901234567890123", b"1"))["messages"] == [user("a\n\nb")]
