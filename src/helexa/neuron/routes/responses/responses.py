"""Serve OpenAI's Responses API (`/v1/responses`): create, store, read and delete responses, compact conversations."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.core.errors import ApiError, unsupported_parameter
from helexa.core.wire.openai_chat import ChatRequest
from helexa.core.wire.responses.compaction import CompactRequest
from helexa.core.wire.responses.input import Item
from helexa.core.wire.responses.request import ResponsesRequest, with_renamed_param
from helexa.http.json_response import JsonResponse
from helexa.neuron.lifecycle.model import ServedModel
from helexa.neuron.requests.inference import sampling_params
from helexa.neuron.requests.response_store import ResponseStore, StoredResponse
from helexa.neuron.routes.body import read_json
from helexa.neuron.routes.chat import converse, rendered
from helexa.neuron.routes.principal import principal_of
from helexa.neuron.routes.projectors.compaction_projector import CompactionProjector
from helexa.neuron.routes.projectors.response_projector import Keep, ResponseProjector
from helexa.neuron.routes.reply import RunResponse
from helexa.neuron.routes.responses.item_page import ItemPage
from helexa.neuron.routes.responses.item_references import referred, resolved


async def create_response(request: Request) -> RunResponse:
    """Handle `POST /v1/responses`: generate a response to a conversation, which may continue a stored response.

    The response is stored unless the client or the configuration disables this.
    """
    responses_request, model, history, chat = await _read_request(request)
    store: ResponseStore = request.app.state.responses
    principal = principal_of(request)
    try:
        events = await converse(model, chat, principal)
    except ApiError as error:
        raise with_renamed_param(error) from None
    is_stored = store.enabled and responses_request.store is not False
    keep = _keep(store, principal, [*history, *responses_request.input]) if is_stored else None
    sampling = sampling_params(chat, model.text.sampling_defaults)
    projector = ResponseProjector(
        model.id, responses_request, keep, temperature=sampling.temperature, top_p=sampling.top_p, stem=store.new_stem()
    )
    return RunResponse(events, projector, stream=bool(responses_request.stream))


async def count_input_tokens(request: Request) -> Response:
    """Handle `POST /v1/responses/input_tokens`: return the number of tokens in the prompt of a request.

    Nothing is generated.
    """
    _, model, _, chat = await _read_request(request)
    try:
        prompt = await rendered(model, chat)
    except ApiError as error:
        raise with_renamed_param(error) from None
    counted = {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}
    return JsonResponse(counted)


async def compact_conversation(request: Request) -> RunResponse:
    """Handle `POST /v1/responses/compact`: let the model summarize a conversation.

    The response has one item with the summary. The client sends this item instead of the conversation in later
    requests.
    """
    _, model, _, chat = await _read_request(request, CompactRequest)
    try:
        events = await converse(model, chat, principal_of(request), thinks=False)
    except ApiError as error:
        raise with_renamed_param(error) from None
    return RunResponse(events, CompactionProjector(), stream=False)


async def get_response(request: Request) -> Response:
    """Handle `GET /v1/responses/{id}`: return a stored response of the same principal."""
    for name in request.query_params:
        raise unsupported_parameter(name)
    store: ResponseStore = request.app.state.responses
    id = request.path_params["response_id"]
    entry = store.find(id, principal_of(request))
    if entry is None:
        raise _unknown(id)
    return Response(entry.body, media_type="application/json")


async def list_input_items(request: Request) -> Response:
    """Handle `GET /v1/responses/{id}/input_items`: return one page of all input items that led to a stored response.

    They include the items of the earlier responses that the response continues.
    """
    page = ItemPage.parse(request.query_params)
    store: ResponseStore = request.app.state.responses
    id = request.path_params["response_id"]
    entry = store.find(id, principal_of(request))
    if entry is None:
        raise _unknown(id)
    body = await asyncio.to_thread(page.listed, entry, id)
    return Response(body, media_type="application/json")


async def delete_response(request: Request) -> Response:
    """Handle `DELETE /v1/responses/{id}`: delete a stored response. Responses that continue it are not deleted."""
    store: ResponseStore = request.app.state.responses
    id = request.path_params["response_id"]
    if not store.remove(id, principal_of(request)):
        raise _unknown(id)
    return JsonResponse({"id": id, "object": "response", "deleted": True})


async def _read_request(
    request: Request, kind: type[ResponsesRequest] = ResponsesRequest
) -> tuple[ResponsesRequest, ServedModel, list[Item], ChatRequest]:
    """Read a request of the Responses API.

    Returns:
        The request with resolved item references, its model, the items of the conversation that it continues, and the
        equivalent chat request for the whole conversation.
    """
    responses_request = kind.parse(await read_json(request))
    model: ServedModel = request.app.state.registry.get(responses_request.model)
    store: ResponseStore = request.app.state.responses
    principal = principal_of(request)
    if responses_request.store and not store.enabled:
        raise unsupported_parameter("store", "'store' must be false: this node stores no responses")
    previous = _previous(store, responses_request.previous_response_id, principal)
    sources = referred(store, responses_request.input, principal)
    history, chat = await asyncio.to_thread(_conversation, previous, responses_request, sources)
    return responses_request, model, history, chat


def _previous(store: ResponseStore, id: str | None, principal: str) -> StoredResponse | None:
    """Return the stored response with the id `id` (`previous_response_id` of a request); None if `id` is None.

    Raises:
        ApiError: status 400: the node stores no responses, or `principal` has no response with this id.
    """
    if id is None:
        return None
    name = "previous_response_id"
    if not store.enabled:
        hint = "this node stores no responses; send the whole conversation as 'input'"
        raise unsupported_parameter(name, f"'{name}' is not supported: {hint}")
    previous = store.find(id, principal)
    if previous is None:
        raise ApiError(400, "previous_response_not_found", f"previous response {id!r} not found", param=name)
    return previous


def _conversation(
    previous: StoredResponse | None, responses_request: ResponsesRequest, sources: Mapping[str, StoredResponse]
) -> tuple[list[Item], ChatRequest]:
    """Return the items of the earlier conversation, and the chat request for the whole conversation.

    References to items in `responses_request.input` are replaced by the items. Slow for long conversations.
    """
    responses_request.input = resolved(responses_request.input, sources)
    history = [] if previous is None else from_json(previous.items)
    return history, responses_request.chat(history)


def _keep(store: ResponseStore, principal: str, items: Sequence[Item]) -> Keep:
    # Join the serialized input items and output items; parts of the output are already encoded.
    def keep(id: str, body: bytes, output: list[dict[str, Any]]) -> None:
        store.put(id, principal, body, to_json(items)[:-1] + b"," + orjson.dumps(output)[1:])

    return keep


def _unknown(id: str) -> ApiError:
    return ApiError(404, "response_not_found", f"response {id[:256]!r} not found", param="response_id")


routes = [
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
    Route("/v1/responses/compact", compact_conversation, methods=["POST"]),
    Route("/v1/responses/{response_id}/input_items", list_input_items, methods=["GET"]),
    Route("/v1/responses/{response_id}", get_response, methods=["GET"]),
    Route("/v1/responses/{response_id}", delete_response, methods=["DELETE"]),
]
