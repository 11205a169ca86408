"""Clients of a gateway see the whole answer of a backend with quirks, and no end that the backend did not send.

Each test asks for the answer in all APIs: chat completions, Messages and Responses, streamed and whole.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from emulator import clients
from emulator.backend import Backend
from emulator.clients import Answer
from emulator.quirk import Quirk
from emulator.table import QUIRKS

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, running_cortex

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
FUNCTIONS: Any = [{"name": name, "parameters": {"type": "object"}} for name in ("add", "sub")]
CALL: Any = {"id": "earlier", "type": "function", "function": {"name": "add", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "earlier", "content": "3"},
        ],
        "tools": [{"type": "function", "function": function} for function in FUNCTIONS],
    },
    MESSAGES: {
        "max_tokens": 64,
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "earlier", "name": "add", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "earlier", "content": "3"}]},
        ],
        "tools": [{"name": function["name"], "input_schema": {"type": "object"}} for function in FUNCTIONS],
    },
    RESPONSES: {
        "input": [
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "earlier", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "earlier", "output": "3"},
        ],
        "tools": [{"type": "function", **function} for function in FUNCTIONS],
        "store": False,
    },
}
WHOLE: dict[str, Callable[[int, bytes], Answer]] = {
    CHAT: clients.chat_whole,
    MESSAGES: clients.message_whole,
    RESPONSES: clients.response_whole,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cortex() -> AsyncIterator[Cortex]:
    async with Backend(QUIRKS).serving() as backend:
        settings = {"neurons": [{"name": "n1", "endpoint": backend.url, "kind": "openai"}]}
        async with running_cortex(FakeNode(url=backend.url), settings=settings, poll_interval_secs=5) as cortex:
            yield cortex


async def ask(cortex: Cortex, name: str, path: str, **fields: Any) -> tuple[int, bytes]:
    body = {"model": name, **BODIES[path], **fields}
    async with cortex.client.post(cortex.url + path, json=body) as response:
        return response.status, await response.read()


async def check_whole(cortex: Cortex, name: str, quirk: Quirk, path: str) -> None:
    answer = WHOLE[path](*await ask(cortex, name, path))
    answer.check(quirk.seen, whole=True)
    check_counts(answer, path)


async def check_stream(
    cortex: Cortex, name: str, quirk: Quirk, path: str, read: Callable[[bytes], Answer], **fields: Any
) -> None:
    status, content = await ask(cortex, name, path, stream=True, **fields)
    if status != 200:
        assert not quirk.seen.text, "the text before the error is lost"
        WHOLE[path](status, content).check(quirk.seen, whole=True)
        return
    answer = read(content)
    if path == CHAT and not fields:
        answer.usage = quirk.seen.usage  # the client requested no usage
    answer.check(quirk.seen)
    check_counts(answer, path)


def check_counts(answer: Answer, path: str) -> None:
    """Assert that token counts which the API requires are never 0."""
    if path != CHAT and answer.error is None:
        assert answer.usage is not None and answer.usage[0] > 0, f"the usage is {answer.usage}"
        assert answer.usage[1] > 0 or not answer.text, f"the usage is {answer.usage}"


@pytest.mark.parametrize(("name", "quirk"), QUIRKS.items(), ids=map(str, QUIRKS.values()))
async def test_clients_of_each_api_read_the_recorded_answers_of_other_servers(
    cortex: Cortex, name: str, quirk: Quirk
) -> None:
    if quirk.stream:
        await check_stream(
            cortex, name, quirk, CHAT, clients.chat_stream_with_usage, stream_options={"include_usage": True}
        )
        await check_stream(cortex, name, quirk, CHAT, clients.chat_stream)
        await check_stream(cortex, name, quirk, MESSAGES, clients.message_stream)
        await check_stream(cortex, name, quirk, RESPONSES, clients.response_stream)
    if quirk.whole is not None:
        for path in WHOLE:
            await check_whole(cortex, name, quirk, path)
