"""The stream of one request's outputs from the engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from helexa.neuron.engine.ipc.messages import Embed, Generate, Logprob, PrefixMiss, TokenOutput

if TYPE_CHECKING:
    from helexa.neuron.vision.shared_pixels import SharedPixels


class TokenStream(AsyncIterator[TokenOutput]):
    """Iterates over the outputs of one request; the last one has `finish` set.

    Outputs that arrive between two reads are merged into one output, so a slow consumer costs little memory. If a read
    is canceled, no output is lost, and the consumer can read again. A call of `aclose` before the last output cancels
    the request.
    """

    def __init__(
        self,
        submit: "Callable[[TokenStream, Generate | Embed], Awaitable[None]]",
        cancel: Callable[[int], None],
        message: Generate | Embed,
        wake_at: int = 1,
        pixels: "Sequence[SharedPixels]" = (),
    ) -> None:
        self.pixels = pixels
        self._submit = submit  # sends the request to the engine
        self._cancel = cancel  # lets the engine drop the request with an id
        self._message = message
        # Number of unread tokens at which a waiting consumer wakes. A number above 1 saves wake-ups, which are
        # expensive compared with reading a token. The first token, an output with `started` and the end of the stream
        # always wake the consumer.
        self._wake_at = wake_at
        self._wanted = 1
        self._submitted = False
        self._news = asyncio.Event()
        self._tokens: list[int] = []
        self._logprobs: list[Logprob] = []
        self._prompt_logprobs: list[Logprob] = []
        self._cached_tokens = 0
        self._last: TokenOutput | None = None
        self._ended = False
        self.miss: PrefixMiss | None = None  # why a long beginning of the prompt was computed again

    @property
    def unread(self) -> int:
        """Number of received tokens that the consumer has not read."""
        return len(self._tokens)

    async def __anext__(self) -> TokenOutput:
        if self._ended:
            raise StopAsyncIteration
        # The constructor does not send the request, so a stream that is never read costs the engine nothing.
        if not self._submitted:
            await self._submit(self, self._message)
            self._submitted = True
        await self._news.wait()
        if self._ended:
            raise StopAsyncIteration
        self._news.clear()
        self._wanted = self._wake_at
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
        """Add an output of the engine, and wake the consumer if necessary."""
        self._tokens += output.tokens
        self._logprobs += output.logprobs
        self._prompt_logprobs += output.prompt_logprobs
        self._cached_tokens += output.cached_tokens
        self.miss = self.miss or output.miss
        if output.finish is not None:
            self._last = output
        if self._last is not None or output.started or len(self._tokens) >= self._wanted:
            self._news.set()

    async def aclose(self) -> None:
        """End the stream. If the request is unfinished, cancel it in the engine."""
        self._ended = True
        self._cancel(self._message.id)
        self._news.set()
