"""The API format of OpenAI Responses.

The server stores no responses, so each request contains the conversation.
"""

from collections.abc import Iterator
from typing import Any

from helexa.acp.conversation_and_events import AssistantMessage, Image, Text, ToolResult, UserMessage
from helexa.acp.providers.connection_and_api_format import Json, count_of, list_of, object_of, text_of
from helexa.acp.providers.error_responses import provider_error
from helexa.acp.providers.requests_and_events import (
    AnswerDelta,
    CallDelta,
    End,
    FinishReason,
    ModelEvent,
    ModelRequest,
    ReasoningDelta,
    Usage,
)

NAME = "openai-responses"

_TEXT = {"response.output_text.delta", "response.refusal.delta"}
_THOUGHT = {"response.reasoning_text.delta", "response.reasoning_summary_text.delta"}


class OpenAIResponses:
    """The API format of OpenAI Responses (`POST /responses`)."""

    path = "/responses"
    models_path = "/models"
    optional: tuple[str, ...] = ("include", "reasoning", "temperature", "max_output_tokens", "store")
    leaks_markers = False

    def body(self, request: ModelRequest, endpoint: str, rejected: frozenset[str]) -> Json:
        """Return the body of `POST /responses` without the keys in `rejected`."""
        body: Json = {
            "model": request.model,
            "instructions": request.system,
            "input": list(_items(request, endpoint)),
            "stream": True,
            "store": False,
            "include": ["reasoning.encrypted_content"],
        }
        if request.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.schema,
                    "strict": False,
                }
                for tool in request.tools
            ]
        if request.max_tokens is not None:
            body["max_output_tokens"] = request.max_tokens
        if request.thought_level != "default":
            body["reasoning"] = {"effort": request.thought_level, "summary": "auto"}
        if request.temperature is not None:
            body["temperature"] = request.temperature
        return {key: value for key, value in body.items() if key not in rejected}

    def headers(self, request: ModelRequest) -> dict[str, str]:
        """Return an empty dictionary, because this API format needs no additional headers."""
        return {}

    def reader(self, request: ModelRequest, endpoint: str) -> "ResponseReader":
        """Return a new reader of one response; see `ApiFormat`."""
        return ResponseReader(request.model, endpoint)


class ResponseReader:
    """Converts the stream events of one response of the Responses API to model events."""

    def __init__(self, model: str, endpoint: str) -> None:
        self._model = model
        self._endpoint = endpoint
        # by key of the output item (see `_key`): index of the tool call, and whether arguments have arrived
        self._calls: dict[Any, tuple[int, bool]] = {}
        self._thoughts = 0
        self._reasoning_items: list[Json] = []  # reasoning items to send back to the endpoint
        self._finish: FinishReason | None = None
        self._usage: Usage | None = None

    def feed(self, event: Json) -> Iterator[ModelEvent]:
        """Yield the model events that correspond to one stream event; see `Reader`."""
        kind = text_of(event.get("type"))
        delta = text_of(event.get("delta"))
        if kind in _TEXT and delta:
            yield AnswerDelta(delta)
        elif kind in _THOUGHT and delta:
            self._thoughts += 1
            yield ReasoningDelta(delta)
        elif kind == "response.reasoning_summary_part.added" and self._thoughts:
            yield ReasoningDelta("\n\n")
        elif kind == "response.output_item.added":
            yield from self._begin(event, object_of(event.get("item")))
        elif kind == "response.function_call_arguments.delta":
            yield from self._arguments(event, delta, complete=False)
        elif kind == "response.function_call_arguments.done":
            yield from self._arguments(event, text_of(event.get("arguments")), complete=True)
        elif kind == "response.output_item.done":
            yield from self._finished(event, object_of(event.get("item")))
        elif kind in ("response.completed", "response.incomplete"):
            self._end(object_of(event.get("response")))
        elif kind in ("response.failed", "error"):
            response = object_of(event.get("response"))
            raise provider_error(self._endpoint, 200, {"error": response.get("error") or event}, {}, ())

    def end(self) -> Iterator[ModelEvent]:
        """Yield token counts and `End` if the response is complete; see `Reader`."""
        if self._finish is None:
            return
        if self._usage is not None:
            yield self._usage
        reason: FinishReason = "tool_calls" if self._calls and self._finish == "stop" else self._finish
        extras = {"endpoint": self._endpoint, "model": self._model, "items": self._reasoning_items}
        yield End(reason, {NAME: extras} if self._reasoning_items else {})

    def _begin(self, event: Json, item: Json) -> Iterator[ModelEvent]:
        key = _key(event)
        if item.get("type") == "function_call" and key not in self._calls:
            index = len(self._calls)
            self._calls[key] = (index, False)
            yield CallDelta(index, text_of(item.get("call_id")) or None, text_of(item.get("name")) or None)

    def _arguments(self, event: Json, text: str, *, complete: bool) -> Iterator[ModelEvent]:
        index, begun = self._calls.get(_key(event), (None, False))
        if index is None or not text or (complete and begun):
            return
        self._calls[_key(event)] = (index, True)
        yield CallDelta(index, arguments=text)

    def _finished(self, event: Json, item: Json) -> Iterator[ModelEvent]:
        if item.get("type") == "function_call":
            yield from self._begin(event, item)
            yield from self._arguments(event, text_of(item.get("arguments")), complete=True)
        elif item.get("type") == "reasoning" and item.get("encrypted_content"):
            self._reasoning_items.append({key: value for key, value in item.items() if key != "status"})

    def _end(self, response: Json) -> None:
        details = object_of(response.get("incomplete_details"))
        reason: FinishReason = "refusal" if details.get("reason") == "content_filter" else "length"
        self._finish = reason if response.get("status") == "incomplete" else "stop"
        if usage := object_of(response.get("usage")):
            self._usage = Usage(
                input=count_of(usage.get("input_tokens")),
                output=count_of(usage.get("output_tokens")),
                cached=count_of(object_of(usage.get("input_tokens_details")).get("cached_tokens")),
                reasoning=count_of(object_of(usage.get("output_tokens_details")).get("reasoning_tokens")),
            )


def _key(event: Json) -> str:
    """Return the key of a stream event's output item: its index, else its id."""
    position = event.get("output_index")
    return str(position) if isinstance(position, int) else text_of(event.get("item_id"))


def _items(request: ModelRequest, endpoint: str) -> Iterator[Json]:
    images: list[Image] = []
    for message in request.messages:
        if images and not isinstance(message, ToolResult):
            yield _user(images)
            images = []
        match message:
            case UserMessage():
                yield _user(message.parts)
            case AssistantMessage():
                yield from _assistant(message, request.model, endpoint)
            case ToolResult():
                yield {"type": "function_call_output", "call_id": message.call_id, "output": message.content}
                images += message.images
    if images:
        yield _user(images)


def _user(parts: Any) -> Json:
    return {"type": "message", "role": "user", "content": [_part(part) for part in parts]}


def _part(part: Text | Image) -> Json:
    if isinstance(part, Text):
        return {"type": "input_text", "text": part.text}
    return {"type": "input_image", "image_url": f"data:{part.mime_type};base64,{part.data}"}


def _assistant(message: AssistantMessage, model: str, endpoint: str) -> Iterator[Json]:
    extras = object_of(message.extras.get(NAME))
    if (extras.get("endpoint"), extras.get("model")) == (endpoint, model):
        yield from map(object_of, list_of(extras.get("items")))
    if message.text:
        yield {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": message.text}]}
    for call in message.calls:
        yield {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
