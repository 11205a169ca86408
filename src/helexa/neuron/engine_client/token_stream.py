"""A stream of one request's outputs, in the order in which the engine sends them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from helexa.neuron.engine.ipc.messages import Embed, Generate, Logprob, TokenOutput

if TYPE_CHECKING:
    from helexa.neuron.vision.preprocessing.shared_pixels import SharedPixels


class RequestSender(Protocol):
    """Interface with the methods of `EngineClient` that a `TokenStream` calls."""

    async def submit(self, stream: "TokenStream", message: Generate | Embed) -> None:
        """Send the request `message` to the engine. The outputs of the request are then added to `stream`."""

    def cancel(self, number: int) -> None:
        """Tell the engine to drop the request with id `number`, unless the request has ended."""


class TokenStream(AsyncIterator[TokenOutput]):
    """An asynchronous iterator over the outputs of one request. The last output has `finish` set.

    Outputs that arrive between two reads are merged into one output, so a slow consumer costs little memory. If a read
    is canceled, no output is lost, and the consumer can read again. A call of `aclose` before the last output cancels
    the request.

    Args:
        gather: number of unread tokens at which a waiting consumer wakes. A number above 1 saves wake-ups, which are
            expensive compared with one token. The first token, an output with `started` and the end of the stream
            always wake the consumer.
        pixels: the pixels of the images of the request.
    """

    def __init__(
        self, client: RequestSender, message: Generate | Embed, gather: int = 1, pixels: "Sequence[SharedPixels]" = ()
    ) -> None:
        self.pixels = pixels
        self._client = client
        self._message = message
        self._gather = gather
        self._wanted = 1
        self._submitted = False
        self._news = asyncio.Event()
        self._tokens: list[int] = []
        self._logprobs: list[Logprob] = []
        self._prompt_logprobs: list[Logprob] = []
        self._cached_tokens = 0
        self._last: TokenOutput | None = None
        self._ended = False

    @property
    def unread(self) -> int:
        """Number of received tokens that the consumer has not read."""
        return len(self._tokens)

    async def __anext__(self) -> TokenOutput:
        if self._ended:
            raise StopAsyncIteration
        if not self._submitted:
            await self._client.submit(self, self._message)
            self._submitted = True
        await self._news.wait()
        if self._ended:
            raise StopAsyncIteration
        self._news.clear()
        self._wanted = self._gather
        tokens, self._tokens = self._tokens, []
        logprobs, self._logprobs = self._logprobs, []
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        cached_tokens, self._cached_tokens = self._cached_tokens, 0
        self._ended = self._last is not None
        return msgspec.structs.replace(
            self._last or TokenOutput(id=self._message.id),
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=cached_tokens,
        )

    def put(self, output: TokenOutput) -> None:
        """Add an output that the engine has sent, and wake the consumer if necessary. The engine client calls this."""
        self._tokens += output.tokens
        self._logprobs += output.logprobs
        self._prompt_logprobs += output.prompt_logprobs
        self._cached_tokens += output.cached_tokens
        if output.finish is not None:
            self._last = output
        if self._last is not None or output.started or len(self._tokens) >= self._wanted:
            self._news.set()

    async def aclose(self) -> None:
        """End the stream. If the request is unfinished, cancel it in the engine."""
        self._ended = True
        self._client.cancel(self._message.id)
        self._news.set()
