"""Serve OpenAI's Responses API (`/v1/responses`)."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson
from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.core.errors import ApiError, unsupported_parameter
from helexa.core.wire.openai_chat import ChatRequest
from helexa.core.wire.responses_input import Item, compaction_item
from helexa.core.wire.responses_output import Event, Logprob, ResponseUsage, response_usage
from helexa.core.wire.responses_request import CompactRequest, ResponsesRequest, with_renamed_param
from helexa.core.wire.responses_writer import ResponseWriter
from helexa.http.responses import JsonResponse
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.output_events import (
    Failed,
    Finished,
    InferenceEvent,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    WasReasoning,
)
from helexa.neuron.requests.inference import converse
from helexa.neuron.requests.prompt_images_and_thinking import chat_prompt
from helexa.neuron.requests.sampling_and_context_limit import sampling_params
from helexa.neuron.routes.replies_disconnects_and_errors import RunResponse, principal_of, read_json
from helexa.neuron.routes.stored_responses import ItemPage, ResponseStore, StoredResponse, referred, resolved

# Function that stores a response, given its id, body and output items.
Keep = Callable[[str, bytes, list[dict[str, Any]]], None]


async def create_response(request: Request) -> RunResponse:
    """Handle `POST /v1/responses`: answer a new or continued conversation."""
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
    """Handle `POST /v1/responses/input_tokens`: count the prompt's tokens."""
    _, model, _, chat = await _read_request(request)
    try:
        prompt = await chat_prompt(model, chat)
    except ApiError as error:
        raise with_renamed_param(error) from None
    counted = {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}
    return JsonResponse(counted)


async def compact_conversation(request: Request) -> RunResponse:
    """Handle `POST /v1/responses/compact`: let the model summarize a conversation."""
    # The response has one item with the summary. The client sends this item instead of the conversation in later
    # requests.
    _, model, _, chat = await _read_request(request, CompactRequest)
    try:
        events = await converse(model, chat, principal_of(request), thinks=False)
    except ApiError as error:
        raise with_renamed_param(error) from None
    return RunResponse(events, CompactionProjector(), stream=False)


async def get_response(request: Request) -> Response:
    """Handle `GET /v1/responses/{id}`: return a stored response of the same principal."""
    for name in request.query_params:  # for example `stream=true`, which would request another format of the answer
        raise unsupported_parameter(name)
    store: ResponseStore = request.app.state.responses
    id = request.path_params["response_id"]
    entry = store.find(id, principal_of(request))
    if entry is None:
        raise _unknown(id)
    return Response(entry.body, media_type="application/json")


async def list_input_items(request: Request) -> Response:
    """Handle `GET /v1/responses/{id}/input_items`: return a page of items."""
    page = ItemPage.parse(request.query_params)
    store: ResponseStore = request.app.state.responses
    id = request.path_params["response_id"]
    entry = store.find(id, principal_of(request))
    if entry is None:
        raise _unknown(id)
    body = await asyncio.to_thread(page.listed, entry, id)
    return Response(body, media_type="application/json")


async def delete_response(request: Request) -> Response:
    """Handle `DELETE /v1/responses/{id}`: delete this response, not earlier ones."""
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
        raise unsupported_parameter(
            "store", "'store' must be false: this node stores no responses ([responses] store_mb is 0)"
        )
    previous = _previous(store, responses_request.previous_response_id, principal)
    sources = referred(store, responses_request.input, principal)
    # Runs in a thread, because parsing the items of a long conversation would block the event loop.
    history, chat = await asyncio.to_thread(_conversation, previous, responses_request, sources)
    return responses_request, model, history, chat


def _previous(store: ResponseStore, id: str | None, principal: str) -> StoredResponse | None:
    """Return the stored response with the id `id`; None if `id` is None."""
    if id is None:
        return None
    name = "previous_response_id"
    if not store.enabled:
        hint = "this node stores no responses; send the whole conversation as 'input'"
        raise unsupported_parameter(name, f"'{name}' is not supported: {hint}")
    previous = store.find(id, principal)
    if previous is None:
        raise ApiError(
            400,
            "previous_response_not_found",
            f"previous response {id!r} not found; it may have expired: send the whole conversation",
            param=name,
        )
    return previous


def _conversation(
    previous: StoredResponse | None, responses_request: ResponsesRequest, sources: Mapping[str, StoredResponse]
) -> tuple[list[Item], ChatRequest]:
    """Return a conversation's earlier items, and the chat request for all its items."""
    responses_request.input = resolved(responses_request.input, sources)
    history = [] if previous is None else from_json(previous.items)
    return history, responses_request.chat(history)


def _keep(store: ResponseStore, principal: str, items: Sequence[Item]) -> Keep:
    # The items are stored as one JSON list: the serialized input items and output items are joined as text, because
    # parts of the output are already encoded.
    def keep(id: str, body: bytes, output: list[dict[str, Any]]) -> None:
        store.put(id, principal, body, to_json(items)[:-1] + b"," + orjson.dumps(output)[1:])

    return keep


def _unknown(id: str) -> ApiError:
    return ApiError(
        404, "response_not_found", f"response {id[:256]!r} not found; it may have expired", param="response_id"
    )


class ResponseProjector:
    """Converts the output events of a run to a response of OpenAI's Responses API.

    Args:
        keep: function that stores the complete response before its end is sent to the client; None to store nothing.
        stem: string that the ids of the response and of all its items contain; random by default.
    """

    def __init__(
        self,
        model: str,
        request: ResponsesRequest,
        keep: Keep | None = None,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stem: str | None = None,
        created: int | None = None,
    ) -> None:
        self._writer = ResponseWriter(
            model,
            request,
            stored=keep is not None,
            temperature=temperature,
            top_p=top_p,
            stem=stem,
            created=created,
        )
        self.id = self._writer.id
        self._keep = keep
        self._end: Finished | None = None

    def frames(self, event: InferenceEvent) -> bytes:
        """Return the server-sent events for `event` as bytes, which may be empty."""
        match event:
            case TextDelta() | ReasoningDelta() | ToolCallStart() | ToolCallDelta() | WasReasoning():
                return self._writer.frames(self._output(event))
            case Started():
                return self._writer.beginnings()
            case Finished():
                items, response, status = self._finished(event)
                return self._writer.frames(items) + self._writer.event(f"response.{status}", response)
            case Failed(error):
                return self._writer.failure(error)
            case _:
                raise AssertionError(f"the stream of a response cannot contain the event {type(event).__name__}")

    def take(self, event: InferenceEvent) -> None:
        """Record the content of `event` that the response body must contain."""
        match event:
            case WasReasoning():
                self._writer.output.was_reasoning()
            case TextDelta() | ReasoningDelta() | ToolCallStart() | ToolCallDelta():
                self._output(event)
            case Finished():
                self._end = event
            case _:
                pass

    def body(self) -> bytes:
        """Return the JSON body, after all events were passed to `take`."""
        assert self._end is not None
        _, response, _ = self._finished(self._end)
        return response

    def _output(self, event: InferenceEvent) -> list[Event]:
        output = self._writer.output
        match event:
            case TextDelta(text, logprobs):
                return output.add_text(text, _logprobs(logprobs))
            case ReasoningDelta(text):
                return output.add_reasoning(text)
            case ToolCallStart():
                return output.begin_call(event.id, event.name)
            case ToolCallDelta():
                return output.add_arguments(event.arguments)
            case _:
                return []

    def _finished(self, end: Finished) -> tuple[list[Event], bytes, str]:
        """Complete and store the response; return last events, body and status."""
        status = "incomplete" if end.reason == "length" else "completed"
        events = self._writer.output.end(status)
        details = {"reason": "max_output_tokens"} if end.reason == "length" else None
        response = self._writer.body(status, incomplete_details=details, usage=usage_of(end))
        if self._keep is not None:
            self._keep(self._writer.id, response, self._writer.output.items)
        return events, response, status


def usage_of(end: Finished) -> ResponseUsage:
    """Return the `usage` of a response (route `/v1/responses`) from a finished run."""
    return response_usage(
        end.prompt_tokens,
        end.completion_tokens,
        cached_tokens=end.cached_tokens,
        reasoning_tokens=end.reasoning_tokens,
        miss=end.miss,
        prefill_ms=end.prefill_ms,
        decode_ms=end.decode_ms,
    )


def _logprobs(tokens: tuple[TokenLogprob, ...]) -> Iterator[Logprob]:
    for entry in tokens:
        top: Any = [{"token": token, "bytes": list(raw), "logprob": logprob} for token, raw, logprob in entry.top]
        yield Logprob(token=entry.token, bytes=list(entry.bytes), logprob=entry.logprob, top_logprobs=top)


class CompactionProjector:
    """Converts a run's text to a response with one summarizing item."""

    def __init__(self) -> None:
        self._stem = secrets.token_hex(16)
        self._texts: list[str] = []
        self._end: Finished | None = None

    def frames(self, event: InferenceEvent) -> bytes:
        """Return no bytes, because this response is never streamed."""
        return b""

    def take(self, event: InferenceEvent) -> None:
        """Record the text or the token counts in `event` for the body."""
        match event:
            case TextDelta(text):
                self._texts.append(text)
            case WasReasoning():
                self._texts.clear()
            case Finished():
                self._end = event
            case _:
                pass

    def body(self) -> bytes:
        """Return the JSON body. `usage` comes last, where gateways search for it."""
        assert self._end is not None
        value = {
            "id": f"resp_{self._stem}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [compaction_item(f"cmp_{self._stem}", "".join(self._texts).strip())],
            "usage": usage_of(self._end),
        }
        return orjson.dumps(value)


routes = [
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
    Route("/v1/responses/compact", compact_conversation, methods=["POST"]),
    Route("/v1/responses/{response_id}/input_items", list_input_items, methods=["GET"]),
    Route("/v1/responses/{response_id}", get_response, methods=["GET"]),
    Route("/v1/responses/{response_id}", delete_response, methods=["DELETE"]),
]
