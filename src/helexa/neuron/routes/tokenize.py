"""Serve `POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.core.errors import ApiError, invalid_body, missing_model, unsupported_parameter
from helexa.core.wire.tokenize import Detokenized, DetokenizeRequest, TokenizeRequest, Tokens
from helexa.http.json_response import JsonResponse
from helexa.neuron.lifecycle.model import ServedModel
from helexa.neuron.requests.prompt import prepared_images, rendered_prompt
from helexa.neuron.routes.body import read_json
from helexa.neuron.routes.chat import thinking_variables
from helexa.neuron.text.templates.chat_template import TemplateError

if TYPE_CHECKING:
    from helexa.neuron.vision.preprocessing.image_sandbox import SharedImage


async def tokenize(request: Request) -> Response:
    """Handle `POST /tokenize`: return the token ids of a text, or of a conversation rendered with the chat template."""
    tokenize_request = TokenizeRequest.parse(await read_json(request))
    model: ServedModel = request.app.state.registry.get(tokenize_request.model)
    images = await prepared_images(model, tokenize_request.messages or ())
    ids = await asyncio.to_thread(_ids, model, tokenize_request, images)
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
    text = await asyncio.to_thread(tokenizer.decode, tokenize_request.tokens, skip_special=False)
    return JsonResponse(Detokenized(prompt=text))


async def tokenizer_info(request: Request) -> Response:
    """Handle `GET /tokenizer_info`: return special tokens, chat template and context length of a model.

    Clients that tokenize prompts themselves need this data.
    """
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
        "add_bos_token": text.tokenizer.add_bos,
        "add_eos_token": text.tokenizer.add_eos,
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
    variables = ending | thinking_variables(model, False) | (tokenize_request.chat_template_kwargs or {})
    try:
        turns = [message.for_template() for message in tokenize_request.messages]
        return rendered_prompt(model, turns, tokenize_request.tools, variables, images).tokens
    except TemplateError as error:
        raise ApiError(422, "template_render_failed", str(error), param="messages") from error


routes = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
]
