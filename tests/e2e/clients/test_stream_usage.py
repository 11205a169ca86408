"""Usage in streams, with OpenAI's client, directly from a node and through a gateway."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from clients.scripted_engine import say
from clients.scripted_stack import MODEL, SayingStack, saying_stack

USAGE: Any = {"include_usage": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SayingStack]:
    folder: Path = tmp_path_factory.mktemp("stream_usage")
    async with saying_stack(folder) as stack:
        yield stack


pytestmark = pytest.mark.asyncio(loop_scope="module")


def clients(stack: SayingStack) -> list[openai.AsyncOpenAI]:
    """Return a client of the gateway and a client of the node."""
    return [stack.openai, stack.openai.with_options(base_url=f"{stack.node_url}/v1")]


async def streams(client: openai.AsyncOpenAI, **fields: Any) -> list[list[Any]]:
    """Return the chunks of a chat completion and of a text completion."""
    messages: Any = [{"role": "user", "content": say("Grüße")}]
    chat: Any = await client.chat.completions.create(model=MODEL, messages=messages, stream=True, **fields)
    text: Any = await client.completions.create(model=MODEL, prompt=say("Grüße"), stream=True, **fields)
    return [[chunk async for chunk in chat], [chunk async for chunk in text]]


@pytest.mark.parametrize("fields", [{}, {"stream_options": {"include_usage": False}}, {"n": 2}])
async def test_each_chunk_of_a_stream_without_requested_usage_has_a_choice(
    stack: SayingStack, fields: dict[str, Any]
) -> None:
    for client in clients(stack):
        for chunks in await streams(client, **fields):
            reasons = [chunk.choices[0].finish_reason for chunk in chunks]  # raises IndexError on an empty list
            assert reasons.count("stop") == fields.get("n", 1)
            assert all("usage" not in chunk.to_dict() for chunk in chunks)


@pytest.mark.parametrize("fields", [{}, {"n": 2}])
async def test_usage_requested_in_stream_options_is_in_the_last_chunk(
    stack: SayingStack, fields: dict[str, Any]
) -> None:
    for client in clients(stack):
        for chunks in await streams(client, stream_options=USAGE, **fields):
            *content_chunks, last = chunks
            assert [chunk.to_dict()["usage"] for chunk in content_chunks] == [None] * len(content_chunks)
            assert all(chunk.choices for chunk in content_chunks)
            assert last.choices == []
            assert last.usage.completion_tokens == fields.get("n", 1) * (len("Grüße".encode()) + 1)
            assert last.usage.to_dict()["helexa_timing"]["prefill_tokens"] > 0


async def test_invalid_stream_options_are_rejected(stack: SayingStack) -> None:
    invalid: Any = {"include_usage": "yes"}
    for client in clients(stack):
        with pytest.raises(openai.BadRequestError, match=r"stream_options\.include_usage"):
            await streams(client, stream_options=invalid)
