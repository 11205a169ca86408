"""Compute the embeddings of texts. The route and the library share this code."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Generic, TypeVar

from helexa.core.errors import ApiError, context_length_exceeded, internal_error, invalid_body, service_unavailable
from helexa.core.logs import tell
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.requests.request_and_run_records import RunRecord, current

_AT_ONCE = 4  # concurrent texts of one request
_RETRY_AFTER_SECONDS = 2

T = TypeVar("T")

logger = logging.getLogger(__name__)


async def embedded(
    model: ServedModel, inputs: Sequence[str | list[int]], principal: str, encode: Callable[[list[float]], T]
) -> tuple[list[T], int]:
    """Return the embedding of each text in order, and the total number of tokens.

    Args:
        inputs: texts, or lists of token ids.
        encode: function that converts an embedding with L2 norm 1 to an element of the returned list.

    Raises:
        ApiError: a text is empty or too long, admission control rejected the request, or the engine failed.
    """
    await model.wake()
    model.require_servable()
    prompts = await model.text.run(_prompts, model, inputs)
    batch = _Batch(model, prompts, principal, encode)
    await batch.run()
    return [vector for vector in batch.vectors if vector is not None], sum(map(len, prompts))


class _Batch(Generic[T]):
    """Computes the embeddings of the texts in one request."""

    def __init__(
        self, model: ServedModel, prompts: Sequence[list[int]], principal: str, encode: Callable[[list[float]], T]
    ) -> None:
        self.vectors: list[T | None] = [None] * len(prompts)
        self._model = model
        self._prompts = prompts
        self._principal = principal
        self._encode = encode
        self._waiting = deque(range(len(prompts)))
        self._working = 0

    async def run(self) -> None:
        """Compute the embeddings of all texts, at most `_AT_ONCE` of them concurrently.

        If admission control rejects a text while other texts of the request are being computed, one of the other
        workers tries the text again later.

        Raises:
            ApiError: admission control rejected a text while no other text was being computed, or the engine failed.
        """
        # Each text passes admission control separately, so that a request with many texts does not block the queue.
        begun, reason = time.perf_counter(), "cancelled"
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(_AT_ONCE, len(self._prompts))):
                    workers.create_task(self._work())
            reason = "stop"
        except ExceptionGroup as errors:
            reason = "error"
            raise errors.exceptions[0] from None
        finally:
            read = [
                len(prompt) for prompt, vector in zip(self._prompts, self.vectors, strict=True) if vector is not None
            ]
            _account(self._model, reason, len(read), sum(read), time.perf_counter() - begun)

    async def _work(self) -> None:
        """Compute embeddings of waiting texts until no text is waiting.

        If admission control rejects a text, the worker returns the text to the waiting texts and stops. If no other
        worker is running, the worker raises the error instead.
        """
        self._working += 1
        try:
            while self._waiting:
                index = self._waiting.popleft()
                prompt = self._prompts[index]
                async with AsyncExitStack() as stack:
                    try:
                        await self._model.wake()
                        await stack.enter_async_context(self._model.admission.admit(self._principal, len(prompt), 0))
                    except ApiError:
                        if self._working == 1:
                            raise
                        self._waiting.appendleft(index)
                        return
                    vector = await _vector(self._model, prompt, self._principal)
                self.vectors[index] = self._encode(vector)
        finally:
            self._working -= 1


def _prompts(model: ServedModel, inputs: Sequence[str | list[int]]) -> list[list[int]]:
    """Return the token ids of each input of an embeddings request."""
    encode, vocab_size, context_length = (
        model.text.tokenizer.encode,
        model.engine.ready.vocab_size,
        model.context_length,
    )
    prompts: list[list[int]] = []
    for index, text in enumerate(inputs):
        prompt = encode(text, add_special=True) if isinstance(text, str) else text
        if not prompt:
            raise invalid_body(f"input.{index}: the text has no tokens; send some text", "input")
        if unknown := [token for token in prompt if not 0 <= token < vocab_size]:
            raise invalid_body(f"input.{index}: {unknown[0]} is not a token id below {vocab_size}", "input")
        if len(prompt) > context_length:
            raise context_length_exceeded(len(prompt), context_length)
        prompts.append(prompt)
    return prompts


async def _vector(model: ServedModel, prompt: list[int], principal: str) -> list[float]:
    """Return the embedding of `prompt`, normalized to an L2 norm of 1."""
    embedding = await model.engine.embed(prompt, pooling=model.text.pooling, salt=principal)
    if embedding.error is not None:
        raise (
            service_unavailable(embedding.error, _RETRY_AFTER_SECONDS)
            if embedding.retry
            else internal_error(embedding.error)
        )
    length = math.hypot(*embedding.vector)
    if not math.isfinite(length) or length == 0:
        raise internal_error(
            "the model returned a vector that is zero or not finite; load the model with another dtype"
        )
    return [value / length for value in embedding.vector]


def _account(model: ServedModel, reason: str, texts: int, tokens: int, seconds: float) -> None:
    run = RunRecord(
        model=model.id,
        reason=reason,
        prompt_tokens=tokens,
        completion_tokens=0,
        cached_tokens=0,
        queue=0.0,
        prefill=seconds,
        decode=0.0,
        first_token=None,
    )
    current().runs.append(run)
    tell(
        logger,
        logging.INFO,
        "embedded",
        model=model.id,
        texts=texts,
        prompt_tokens=tokens,
        finish_reason=reason,
        duration_ms=round(seconds * 1000),
    )
