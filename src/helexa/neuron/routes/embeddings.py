"""`POST /v1/embeddings`."""

import asyncio
import logging
import math
import time
from collections.abc import Sequence

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.core.errors import ApiError, context_length_exceeded, internal_error, invalid_body, service_unavailable
from helexa.core.logs import tell
from helexa.core.wire.openai_embeddings import EmbeddingsRequest, embeddings
from helexa.http.hang_up import ClientGone, HangUp
from helexa.neuron.exchange import RunRecord, current
from helexa.neuron.model import ServedModel
from helexa.neuron.routes.body import read_json
from helexa.neuron.routes.principal import principal_of

_RETRY_AFTER_SECONDS = 2

logger = logging.getLogger(__name__)


async def create_embeddings(request: Request) -> Response:
    """The vectors of texts, each of length 1."""
    asked = EmbeddingsRequest.parse(await read_json(request))
    model: ServedModel = request.app.state.registry.get(asked.model)
    model.require_servable()
    prompts = await asyncio.to_thread(_prompts, model, asked.input)
    principal, begun = principal_of(request), time.perf_counter()
    hang_up: HangUp = request.scope["extensions"][HangUp.NAME]
    try:
        with hang_up:
            vectors = [await _vector(model, prompt, principal) for prompt in prompts]
    except ClientGone:
        raise ApiError(400, "client_disconnected", "the client went away") from None
    tokens = sum(map(len, prompts))
    _account(model, len(prompts), tokens, time.perf_counter() - begun)
    return Response(
        orjson.dumps(embeddings(model.id, vectors, tokens, asked.encoding_format)), media_type="application/json"
    )


def _prompts(model: ServedModel, inputs: Sequence[str | list[int]]) -> list[list[int]]:
    """The inputs as token ids that the model has.

    Raises:
        ApiError: one is empty, too long, or has an unknown token.
    """
    encode, vocab_size, most = model.text.tokenizer.encode, model.engine.ready.vocab_size, model.context_length
    prompts: list[list[int]] = []
    for index, one in enumerate(inputs):
        prompt = encode(one, add_special=True) if isinstance(one, str) else one
        if not prompt:
            raise invalid_body(f"input.{index}: has no tokens", "input")
        if unknown := [token for token in prompt if not 0 <= token < vocab_size]:
            raise invalid_body(f"input.{index}: {unknown[0]} is not a token id below {vocab_size}", "input")
        if len(prompt) > most:
            raise context_length_exceeded(len(prompt), most)
        prompts.append(prompt)
    return prompts


async def _vector(model: ServedModel, prompt: list[int], principal: str) -> list[float]:
    """One text's vector. Each takes its own turn, so that a long list does not keep others waiting.

    Raises:
        ApiError: the model is too busy, or its engine failed.
    """
    async with model.admission.seat(principal, len(prompt), 0):
        said = await model.engine.embed(prompt, pooling=model.text.pooling, salt=principal)
    if said.error is not None:
        raise service_unavailable(said.error, _RETRY_AFTER_SECONDS) if said.retry else internal_error(said.error)
    length = math.hypot(*said.vector)
    if not math.isfinite(length) or length == 0:
        raise internal_error("the model made no finite vector of a text")
    return [value / length for value in said.vector]


def _account(model: ServedModel, texts: int, tokens: int, seconds: float) -> None:
    run = RunRecord(
        model=model.id,
        reason="stop",
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
        duration_ms=round(seconds * 1000),
    )


routes = [Route("/v1/embeddings", create_embeddings, methods=["POST"])]
