"""Many clients at once, half of whom do not stay."""

import asyncio
from typing import Any

import openai

from clients.stack import MODEL, Stack

COUNT = [{"role": "user", "content": "Count from one to a thousand."}]
TOKENS = 12


async def complete(client: openai.AsyncOpenAI, stream: bool) -> int:
    """The number of tokens that an answer took."""
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
    """Read a few chunks of an answer that would be long, then go."""
    fields: Any = {"model": MODEL, "messages": COUNT, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    async with await client.chat.completions.create(**fields, stream=True) as stream:
        for _ in range(chunks):
            await anext(stream)


async def leave_before_the_answer(client: openai.AsyncOpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": COUNT, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    asking = asyncio.create_task(client.chat.completions.create(**fields))
    await asyncio.sleep(0.2)  # by now it is a request that somebody works on
    asking.cancel()
    await asyncio.wait([asking])


async def test_half_of_many_clients_hang_up(stack: Stack):
    async with stack.async_client() as client:
        answers, _ = await asyncio.gather(
            asyncio.gather(*(complete(client, stream=number % 4 > 0) for number in range(16))),
            asyncio.gather(
                *(hang_up(client, chunks=number) for number in range(12)),
                *(leave_before_the_answer(client) for _ in range(4)),
            ),
        )
    assert answers == [TOKENS] * 16
    stack.until_idle()
