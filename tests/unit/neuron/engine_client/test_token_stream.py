"""Token streams: outputs are merged until they are read, and wake non-streaming requests seldom."""

import asyncio

import pytest

from helexa.neuron.engine.ipc.messages import Embed, Generate, SamplingParams, TokenOutput
from helexa.neuron.engine_client.token_stream import TokenStream

REQUEST = Generate(id=1, prompt=[1], max_tokens=9, sampling=SamplingParams())


class Client:
    """A client that records canceled requests."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    async def submit(self, stream: TokenStream, message: Generate | Embed) -> None:
        pass

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


async def read(wake_at: int, tokens: int) -> list[list[int]]:
    """Return the tokens that a consumer reads at each wake-up. Tokens arrive one by one."""
    client = Client()
    stream = TokenStream(client.submit, client.cancel, REQUEST, wake_at)
    reading = asyncio.create_task(_all(stream))
    for token in range(tokens):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream.put(TokenOutput(id=1, tokens=[token], finish="length" if token == tokens - 1 else None))
    return await reading


async def _all(stream: TokenStream) -> list[list[int]]:
    return [output.tokens async for output in stream]


async def test_token_stream_with_option_gather_1_yields_each_token_separately() -> None:
    assert await read(1, 4) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    "tokens, woken", [(1, [1]), (2, [1, 1]), (4, [1, 3]), (5, [1, 3, 1]), (9, [1, 3, 3, 2]), (10, [1, 3, 3, 3])]
)
async def test_token_stream_yields_the_first_token_and_then_groups_of_as_many_as_option_gather(tokens, woken) -> None:
    chunks = await read(3, tokens)
    assert [len(chunk) for chunk in chunks] == woken
    assert [token for chunk in chunks for token in chunk] == list(range(tokens))


async def test_aclose_of_a_token_stream_drops_undelivered_tokens() -> None:
    client = Client()
    stream = TokenStream(client.submit, client.cancel, REQUEST, 3)
    reading = asyncio.create_task(_all(stream))
    await asyncio.sleep(0)
    stream.put(TokenOutput(id=1, tokens=[0]))
    await asyncio.sleep(0)
    stream.put(TokenOutput(id=1, tokens=[1]))
    await stream.aclose()
    assert await reading == [[0]]
    assert client.cancelled == [1]
