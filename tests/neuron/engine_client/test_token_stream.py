"""A request's outputs: merged while nobody reads, and gathered for whoever wants them all."""

import asyncio

import pytest

from helexa.neuron.engine.ipc.messages import Generate, SamplingParams, TokenOutput
from helexa.neuron.engine_client.token_stream import TokenStream

REQUEST = Generate(id=1, prompt=[1], max_tokens=9, sampling=SamplingParams())


class Client:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    async def submit(self, stream: TokenStream, message: Generate) -> None:
        pass

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


async def read(gather: int, tokens: int) -> list[list[int]]:
    """What a consumer gets each time that it is woken, of tokens that come one by one."""
    stream = TokenStream(Client(), REQUEST, gather)  # type: ignore[arg-type]
    reading = asyncio.create_task(_all(stream))
    for token in range(tokens):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream.put(TokenOutput(id=1, tokens=[token], finish="length" if token == tokens - 1 else None))
    return await reading


async def _all(stream: TokenStream) -> list[list[int]]:
    return [output.tokens async for output in stream]


async def test_each_token_comes_alone_for_whoever_streams() -> None:
    assert await read(1, 4) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    "tokens, woken", [(1, [1]), (2, [1, 1]), (4, [1, 3]), (5, [1, 3, 1]), (9, [1, 3, 3, 2]), (10, [1, 3, 3, 3])]
)
async def test_whoever_gathers_is_woken_for_the_first_for_so_many_and_for_the_end(tokens, woken) -> None:
    found = await read(3, tokens)
    assert [len(part) for part in found] == woken
    assert [token for part in found for token in part] == list(range(tokens))


async def test_nothing_is_kept_back_of_an_answer_that_was_given_up() -> None:
    client = Client()
    stream = TokenStream(client, REQUEST, 3)  # type: ignore[arg-type]
    reading = asyncio.create_task(_all(stream))
    await asyncio.sleep(0)
    stream.put(TokenOutput(id=1, tokens=[0]))
    await asyncio.sleep(0)
    stream.put(TokenOutput(id=1, tokens=[1]))
    await stream.aclose()
    assert await reading == [[0]]
    assert client.cancelled == [1]
