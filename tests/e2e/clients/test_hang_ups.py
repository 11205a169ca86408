"""Many concurrent clients, half of which disconnect early."""

import asyncio
from typing import Any

import openai

from clients.stack import MODEL, Stack

COUNT = [{"role": "user", "content": "Count from one to a thousand."}]
TOKENS = 12


async def complete(client: openai.AsyncOpenAI, stream: bool) -> int:
    """Send a request and return its number of completion tokens."""
    fields: Any = {"model": MODEL, "messages": COUNT, "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
    if not stream:
        return (await client.chat.completions.create(**fields)).usage.completion_tokens
    usage = None
    async for chunk in await client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage
    assert usage is not None, "the stream was cut short"
    return usage.completion_tokens


async def hang_up(client: openai.AsyncOpenAI, chunks: int) -> None:
    """Read `chunks` chunks of a long completion, then disconnect."""
    fields: Any = {"model": MODEL, "messages": COUNT, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    async with await client.chat.completions.create(**fields, stream=True) as stream:
        for _ in range(chunks):
            await anext(stream)


def ask(client: openai.AsyncOpenAI) -> asyncio.Task[Any]:
    """Request a long completion without streaming."""
    fields: Any = {"model": MODEL, "messages": COUNT, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    return asyncio.create_task(client.chat.completions.create(**fields))


async def disconnect_before_the_response(request: asyncio.Task[Any]) -> None:
    assert not request.done()
    request.cancel()
    await asyncio.wait([request])


async def test_requests_of_other_clients_finish_while_many_clients_hang_up(stack: Stack):
    async with stack.async_client() as client:
        silent = [ask(client) for _ in range(4)]
        await asyncio.to_thread(stack.node.until, lambda: stack.load()["in_flight"] == 4, "the node runs four requests")
        token_counts, _ = await asyncio.gather(
            asyncio.gather(*(complete(client, stream=number % 4 > 0) for number in range(16))),
            asyncio.gather(
                *(hang_up(client, chunks=number) for number in range(12)),
                *(disconnect_before_the_response(request) for request in silent),
            ),
        )
    assert token_counts == [TOKENS] * 16
    stack.until_idle()
