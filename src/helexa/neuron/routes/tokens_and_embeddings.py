"""Serve `/tokenize`, `/detokenize`, `/tokenizer_info` and `/v1/embeddings`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.core.errors import ApiError, invalid_body, missing_model, unsupported_parameter
from helexa.core.wire.tokens_and_embeddings import (
    Detokenized,
    DetokenizeRequest,
    EmbeddingsRequest,
    TokenizeRequest,
    Tokens,
    embeddings,
    encoded,
    shortened,
)
from helexa.http.request_cycle_and_disconnects import ClientDisconnected, DisconnectGuard
from helexa.http.responses import JsonResponse
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.requests.embedding import embedded
from helexa.neuron.requests.prompt_images_and_thinking import prepared_images, rendered_prompt, thinking_variables
from helexa.neuron.routes.replies_disconnects_and_errors import principal_of, read_json

if TYPE_CHECKING:
    from helexa.neuron.vision.model_vision import SharedImage


async def tokenize(request: Request) -> Response:
    """Handle `POST /tokenize`: return the token ids of a text or a chat."""
    tokenize_request = TokenizeRequest.parse(await read_json(request))
    model: ServedModel = request.app.state.registry.get(tokenize_request.model)
    images = await prepared_images(model, tokenize_request.messages or ())
    ids = await model.text.run(_ids, model, tokenize_request, images)
    tokens = Tokens(count=len(ids), max_model_len=model.context_length, tokens=ids)
    if tokenize_request.return_token_strs:
        tokens["token_strs"] = [model.text.tokenizer.token_text(token) for token in ids]
    return JsonResponse(tokens)


async def detokenize(request: Request) -> Response:
    """Handle `POST /detokenize`: return the text for a list of token ids."""
    tokenize_request = DetokenizeRequest.parse(await read_json(request))
    model: ServedModel = request.app.state.registry.get(tokenize_request.model)
    tokenizer = model.text.tokenizer
    for index, token in enumerate(tokenize_request.tokens):
        if not 0 <= token < tokenizer.vocab_size:
            raise invalid_body(f"tokens.{index}: {token} is not a token id below {tokenizer.vocab_size}", "tokens")
    text = await model.text.run(tokenizer.decode, tokenize_request.tokens, skip_special=False)
    return JsonResponse(Detokenized(prompt=text))


async def tokenizer_info(request: Request) -> Response:
    """Handle `GET /tokenizer_info`: return the special tokens and the chat template."""
    for name in request.query_params:
        if name != "model":
            raise unsupported_parameter(name)
    name = request.query_params.get("model")
    if not name:
        raise missing_model()
    model: ServedModel = request.app.state.registry.get(name)
    text = model.text
    info = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.context_length,
        "add_bos_token": text.tokenizer.bos_id in text.tokenizer.prefix,
        "add_eos_token": text.tokenizer.eos_id in text.tokenizer.suffix,
        "chat_template": text.template.source or None,
        "bos_token": text.tokenizer.token_text(text.tokenizer.bos_id),
        "eos_token": text.tokenizer.token_text(text.tokenizer.eos_id),
        **text.template.special_tokens,
    }
    return JsonResponse(info)


def _ids(model: ServedModel, tokenize_request: TokenizeRequest, images: "Sequence[SharedImage]") -> list[int]:
    if tokenize_request.messages is None:
        return model.text.tokenizer.encode(
            tokenize_request.prompt or "", add_special=tokenize_request.add_special_tokens is not False
        )
    ending = {
        "add_generation_prompt": tokenize_request.add_generation_prompt,
        "continue_final_message": tokenize_request.continue_final_message,
    }
    thinking = thinking_variables(model, tokenize_request.thinks)
    variables = ending | thinking | (tokenize_request.chat_template_kwargs or {})
    return rendered_prompt(model, tokenize_request.messages, tokenize_request.offered_tools, variables, images).tokens


async def create_embeddings(request: Request) -> Response:
    """Handle `POST /v1/embeddings`: return one vector of L2 norm 1 per text."""
    embeddings_request = EmbeddingsRequest.parse(await read_json(request))
    model: ServedModel = request.app.state.registry.get(embeddings_request.model)
    disconnect: DisconnectGuard = request.scope["extensions"][DisconnectGuard.NAME]
    encoding, dimensions = embeddings_request.encoding_format, embeddings_request.dimensions
    try:
        with disconnect:
            vectors, tokens = await embedded(
                model,
                embeddings_request.input,
                principal_of(request),
                lambda vector: encoded(shortened(vector, dimensions), encoding),
            )
    except ClientDisconnected:
        raise ApiError(400, "client_disconnected", "the client disconnected during the request") from None
    return JsonResponse(embeddings(model.id, vectors, tokens))


routes = [
    Route("/v1/embeddings", create_embeddings, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
]
