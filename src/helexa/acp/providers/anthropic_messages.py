"""Anthropic's API format for messages: request bodies and stream events."""

import json
from collections.abc import Iterator
from typing import Any

from helexa.acp.conversation_and_events import AssistantMessage, Image, Text, ToolCall, ToolResult, UserMessage
from helexa.acp.providers.connection_and_api_format import Json, count_of, list_of, object_of, text_of
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

NAME = "anthropic-messages"

DEFAULT_MAX_TOKENS = 8192
MIN_BUDGET = 1024  # smallest `budget_tokens` of thinking that the API accepts

_FINISH: dict[str, FinishReason] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "refusal",
}
_BUDGET_DIVISOR = {"low": 4, "medium": 2, "high": 1.25}  # thinking budget in tokens = max_tokens / value


class AnthropicMessages:
    """The API format of Anthropic messages (`POST /messages`).

    If the endpoint rejects a thinking budget in tokens for a model, later requests set a thinking effort instead.
    """

    path = "/messages"
    models_path = "/models?limit=1000"
    optional: tuple[str, ...] = ("budget_tokens", "thinking", "output_config", "cache_control", "temperature")
    leaks_markers = False

    def body(self, request: ModelRequest, endpoint: str, rejected: frozenset[str]) -> Json:
        """Return the body of `POST /messages` without the keys in `rejected`."""
        max_tokens = request.max_tokens or DEFAULT_MAX_TOKENS
        body: Json = {
            "model": request.model,
            "max_tokens": max_tokens,
            "messages": _messages(request, endpoint),
            "stream": True,
            "cache_control": {"type": "ephemeral"},
        }
        if request.system:
            body["system"] = request.system
        if request.tools:
            body["tools"] = [
                {"name": tool.name, "description": tool.description, "input_schema": tool.schema}
                for tool in request.tools
            ]
        if request.thought_level == "none":
            body["thinking"] = {"type": "disabled"}
        elif request.thought_level != "default":
            body |= _thinking(request.thought_level, max_tokens, adaptive="budget_tokens" in rejected)
        if request.temperature is not None and body.get("thinking", {}).get("type") in (None, "disabled"):
            body["temperature"] = request.temperature
        return {key: value for key, value in body.items() if key not in rejected}

    def headers(self, request: ModelRequest) -> dict[str, str]:
        """Return an empty dictionary, because this API format needs no additional headers."""
        return {}

    def reader(self, request: ModelRequest, endpoint: str) -> "MessageReader":
        """Return a new reader of one response; see `ApiFormat`."""
        return MessageReader(request.model, endpoint)


def _thinking(level: str, max_tokens: int, *, adaptive: bool) -> Json:
    if adaptive:
        return {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": level}}
    budget = int(max_tokens / _BUDGET_DIVISOR[level])
    if not MIN_BUDGET <= budget < max_tokens:
        return {}
    return {"thinking": {"type": "enabled", "budget_tokens": budget}}


class MessageReader:
    """Converts the stream events of one Anthropic message to model events."""

    def __init__(self, model: str, endpoint: str) -> None:
        self._model = model
        self._endpoint = endpoint
        self._calls: dict[Any, int] = {}  # content block index -> index of the tool call in the response
        self._thoughts: dict[Any, Json] = {}  # thinking blocks to send back to the endpoint, by content block index
        self._usage: dict[str, int] = {}
        self._finish: FinishReason | None = None

    def feed(self, event: Json) -> Iterator[ModelEvent]:
        """Yield the model events that correspond to one stream event; see `Reader`."""
        position = event.get("index")
        match event.get("type"):
            case "message_start":
                self._count(object_of(object_of(event.get("message")).get("usage")))
            case "content_block_start" if isinstance(position, int):
                yield from self._begin(position, object_of(event.get("content_block")))
            case "content_block_delta" if isinstance(position, int):
                yield from self._delta(position, object_of(event.get("delta")))
            case "message_delta":
                self._count(object_of(event.get("usage")))
                if reason := text_of(object_of(event.get("delta")).get("stop_reason")):
                    self._finish = _FINISH.get(reason, "stop")

    def end(self) -> Iterator[ModelEvent]:
        """Yield token counts and `End` if the response is complete; see `Reader`."""
        if self._finish is None:
            return
        cached = self._usage.get("cache_read_input_tokens", 0)
        uncached = self._usage.get("input_tokens", 0) + self._usage.get("cache_creation_input_tokens", 0)
        if self._usage:
            yield Usage(uncached + cached, self._usage.get("output_tokens", 0), cached=cached)
        reason: FinishReason = "tool_calls" if self._calls and self._finish == "stop" else self._finish
        thinking_blocks = [block for block in self._thoughts.values() if block.get("signature") or block.get("data")]
        extras = {"endpoint": self._endpoint, "model": self._model, "blocks": thinking_blocks}
        yield End(reason, {NAME: extras} if thinking_blocks else {})

    def _begin(self, position: int, block: Json) -> Iterator[ModelEvent]:
        match block.get("type"):
            case "tool_use":
                index = self._calls[position] = len(self._calls)
                input = object_of(block.get("input"))  # empty if the arguments are streamed
                arguments = json.dumps(input) if input else ""
                yield CallDelta(index, text_of(block.get("id")) or None, text_of(block.get("name")) or None, arguments)
            case "text" if text := text_of(block.get("text")):
                yield AnswerDelta(text)
            case "thinking":
                thought = text_of(block.get("thinking"))
                self._thoughts[position] = {"type": "thinking", "thinking": thought, "signature": ""}
                if thought:
                    yield ReasoningDelta(thought)
            case "redacted_thinking":
                self._thoughts[position] = {"type": "redacted_thinking", "data": text_of(block.get("data"))}

    def _delta(self, position: int, delta: Json) -> Iterator[ModelEvent]:
        match delta.get("type"):
            case "text_delta" if text := text_of(delta.get("text")):
                yield AnswerDelta(text)
            case "input_json_delta" if position in self._calls and (text := text_of(delta.get("partial_json"))):
                yield CallDelta(self._calls[position], arguments=text)
            case "thinking_delta" if thought := text_of(delta.get("thinking")):
                if position in self._thoughts:
                    self._thoughts[position]["thinking"] += thought
                yield ReasoningDelta(thought)
            case "signature_delta" if position in self._thoughts:
                self._thoughts[position]["signature"] += text_of(delta.get("signature"))

    def _count(self, usage: Json) -> None:
        for name in ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
            if count := count_of(usage.get(name)):
                self._usage[name] = count


def _messages(request: ModelRequest, endpoint: str) -> list[Json]:
    """Return the `messages` for the request body.

    The roles `user` and `assistant` alternate, and the first message has the role `user`.
    """
    messages: list[Json] = []
    for message in request.messages:
        match message:
            case UserMessage():
                role, blocks = "user", [_part(part) for part in message.parts if part != Text("")]
            case AssistantMessage():
                role, blocks = "assistant", _assistant(message, request.model, endpoint)
            case ToolResult():
                role, blocks = "user", [_result(message)]
            case _:
                continue
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += blocks
        elif blocks:
            messages.append({"role": role, "content": blocks})
    if messages and messages[0]["role"] == "assistant":
        messages.insert(0, {"role": "user", "content": [{"type": "text", "text": "(the conversation goes on)"}]})
    return messages


def _part(part: Text | Image) -> Json:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    return {"type": "image", "source": {"type": "base64", "media_type": part.mime_type, "data": part.data}}


def _assistant(message: AssistantMessage, model: str, endpoint: str) -> list[Json]:
    blocks: list[Json] = []
    extras = object_of(message.extras.get(NAME))
    if (extras.get("endpoint"), extras.get("model")) == (endpoint, model):
        blocks += map(object_of, list_of(extras.get("blocks")))
    if message.text.strip():
        blocks.append({"type": "text", "text": message.text})
    return blocks + [_call(call) for call in message.calls]


def _call(call: ToolCall) -> Json:
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        arguments = None
    input = arguments if isinstance(arguments, dict) else {"malformed": call.arguments}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": input}


def _result(result: ToolResult) -> Json:
    content: Any = result.content or "(nothing)"
    if result.images:
        content = [{"type": "text", "text": content}, *map(_part, result.images)]
    return {"type": "tool_result", "tool_use_id": result.call_id, "content": content, "is_error": result.failed}
