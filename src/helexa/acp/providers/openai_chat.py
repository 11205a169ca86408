"""OpenAI's API format for chat completions, as many servers implement it.

Servers deviate from OpenAI's format of streamed tool calls. Some give all calls of a response the same index or no
index. Others omit the call ids, or repeat id and name in each delta.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from helexa.acp.conversation_and_events import AssistantMessage, Image, Message, Part, Text, ToolResult, UserMessage
from helexa.acp.providers.connection_and_api_format import Json, count_of, list_of, object_of, text_of
from helexa.acp.providers.requests_and_events import (
    AnswerDelta,
    CallDelta,
    End,
    FinishReason,
    ModelEvent,
    ModelRequest,
    ProviderError,
    ReasoningDelta,
    Usage,
)

_MAX_CHECKS = 1000


@dataclass(eq=False)
class _Call:
    """A tool call of the response.

    `repeated`: whether the server has repeated the name after complete arguments.
    """

    index: int
    id: str
    name: str = ""
    arguments: str = ""
    repeated: bool = False
    checks: int = 0

    def is_complete(self) -> bool:
        """Return whether the arguments received so far are a whole JSON object.

        After `_MAX_CHECKS` checks of a call, the result is always False, because each check parses all arguments.
        """
        self.checks += 1
        if self.checks > _MAX_CHECKS or not self.arguments.rstrip().endswith("}"):
            return False
        try:
            return isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            return False


class ChatCalls:
    """Converts the deltas of tool calls in one response to `CallDelta` events.

    A delta continues the call with the same index. A delta without an index continues the call with the same id. A
    delta with neither continues the newest call. Servers use the same index for several calls, so there are two
    exceptions:

    * If the delta's id differs from the id of the call with this index, the id decides.
    * If a delta without an id has another name than the call, or repeats the name after complete arguments, the delta
      begins a new call.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._by_id: dict[str, _Call] = {}

    def __len__(self) -> int:
        """Return the number of calls so far."""
        return len(self._calls)

    def read(self, delta: Json) -> Iterator[CallDelta]:
        """Yield the event for one delta of a tool call, if the delta is not empty."""
        function = object_of(delta.get("function"))
        name, id = text_of(function.get("name")), text_of(delta.get("id"))
        arguments = function.get("arguments")
        text = json.dumps(arguments) if isinstance(arguments, dict) else text_of(arguments)
        index = delta.get("index") if type(delta.get("index")) is int else None
        call = self._continued(index, id, name, text)
        if call is None:
            call = _Call(len(self._calls), id)
            self._calls.append(call)
            if index is not None:
                self._by_index[index] = call
            if id:
                self._by_id[id] = call
        elif not text and (call.repeated or call.name or not name):
            return
        shown_name = "" if call.name else name
        call.name = call.name or name
        call.arguments += text
        yield CallDelta(call.index, id or None, shown_name or None, text)

    def _continued(self, index: int | None, id: str, name: str, text: str) -> _Call | None:
        """Return the call that a delta continues, or None if the delta begins a new call."""
        if index is not None:
            call = self._by_index.get(index)
        else:
            call = self._by_id.get(id) if id else self._calls[-1] if self._calls else None
        if call is None:
            return None
        if id and call.id and id != call.id:
            return self._by_id.get(id)
        if id or not call.name:
            return call
        if (name and name != call.name) or (call.repeated and text):
            return None
        if name and call.is_complete():
            if text:
                return None
            call.repeated = True
        return call


NAME = "openai-chat"

_REASONS: dict[FinishReason, tuple[str, ...]] = {
    "stop": ("stop", "eos", "eos_token", "end_turn", "stop_sequence", "complete"),
    "length": ("length", "max_tokens", "max_length", "max_output_tokens", "model_length", "repetition"),
    "tool_calls": ("tool_calls", "tool_call", "tool_use", "function_call"),
    "refusal": ("content_filter", "refusal", "safety", "sensitive", "recitation", "blocklist", "prohibited_content"),
}
_FINISH: dict[str, FinishReason] = {name: reason for reason, names in _REASONS.items() for name in names}
_NO_REASON = ("", "null", "none")  # finish reasons that some servers send in each chunk before the last chunk
_REASONING = ("reasoning_content", "reasoning", "thinking")
_SHOWN_CHARS = 64


class OpenAIChat:
    """The API format of OpenAI chat completions (`POST /chat/completions`)."""

    path = "/chat/completions"
    models_path = "/models"
    optional: tuple[str, ...] = (
        "stream_options",
        "reasoning_effort",
        "chat_template_kwargs",
        "temperature",
        "max_tokens",
        "max_completion_tokens",
    )
    leaks_markers = True

    def body(self, request: ModelRequest, endpoint: str, rejected: frozenset[str]) -> Json:
        """Return the body of `POST /chat/completions` without the keys in `rejected`."""
        body: Json = {
            "model": request.model,
            "messages": _messages(request, endpoint),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {"name": tool.name, "description": tool.description, "parameters": tool.schema},
                }
                for tool in request.tools
            ]
        if request.max_tokens is not None:
            body["max_completion_tokens" if "max_tokens" in rejected else "max_tokens"] = request.max_tokens
        if request.thought_level != "default":
            body["reasoning_effort"] = request.thought_level
            body["chat_template_kwargs"] = {"enable_thinking": request.thought_level != "none"}
        if request.temperature is not None:
            body["temperature"] = request.temperature
        return {key: value for key, value in body.items() if key not in rejected}

    def headers(self, request: ModelRequest) -> dict[str, str]:
        """Return the header `x-include-thinking`, unless the thought level is `none`."""
        # helexa's nodes return reasoning only if this header is set.
        return {} if request.thought_level == "none" else {"x-include-thinking": "true"}

    def reader(self, request: ModelRequest, endpoint: str) -> "ChatReader":
        """Return a new reader of one response; see `ApiFormat`."""
        return ChatReader(endpoint)


class ChatReader:
    """Converts the chunks of one streamed chat completion to model events."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._finish: FinishReason | None = None
        self._usage: Usage | None = None
        self._reasoning: str | None = None  # name of the field in which the server sends reasoning
        self._calls = ChatCalls()
        self._has_deltas = False
        self._answer_chars = 0

    def feed(self, event: Json) -> Iterator[ModelEvent]:
        """Yield the model events that correspond to one chunk; see `Reader`."""
        if usage := object_of(event.get("usage")):
            self._usage = _usage(usage)
        for choice in list_of(event.get("choices"))[:1]:
            choice = object_of(choice)
            if error := choice.get("error"):
                raise self._failed(text_of(object_of(error).get("message")) or "an error")
            events: Iterator[ModelEvent] = iter(())
            if delta := object_of(choice.get("delta")):
                self._has_deltas = True
                events = self._delta(delta)
            elif message := object_of(choice.get("message")):
                events = self._delta(self._rest_of(message) if self._has_deltas else message)
            elif text := text_of(choice.get("text")):
                events = self._delta({"content": text})
            has_output = False
            for model_event in events:
                has_output = True
                yield model_event
            self._read_reason(choice.get("finish_reason"), replace=has_output)

    def end(self) -> Iterator[ModelEvent]:
        """Yield token counts and `End` if the response is complete; see `Reader`."""
        if self._finish is None:
            return
        if self._usage is not None:
            yield self._usage
        reason: FinishReason = "tool_calls" if len(self._calls) and self._finish == "stop" else self._finish
        extras = {"endpoint": self._endpoint, "reasoning": self._reasoning}
        yield End(reason, {NAME: extras} if self._reasoning else {})

    def _read_reason(self, value: Any, *, replace: bool) -> None:
        """Store the finish reason `value` of a chunk, if the chunk has one.

        A reason that is already stored is replaced only if `replace` is True. Then the chunk also contains output, so
        the server sent the stored reason too early.
        """
        # Some servers send "stop" in each chunk. Others send "stop" again after the correct reason.
        name = text_of(object_of(value).get("type") if isinstance(value, dict) else value).strip().lower()
        if name in _NO_REASON or (self._finish is not None and not replace):
            return
        if name not in _FINISH:
            raise self._failed(name[:_SHOWN_CHARS])
        self._finish = _FINISH[name]

    def _failed(self, reason: str) -> ProviderError:
        return ProviderError("interrupted", f"{self._endpoint} ended its answer with: {reason}; send the prompt again")

    def _rest_of(self, message: Json) -> Json:
        """Return the part of MiniMax's final `message` that no delta contained.

        MiniMax streams deltas and then repeats the whole response as one message.
        """
        rest: Json = {"content": text_of(message.get("content"))[self._answer_chars :]}
        return rest if len(self._calls) else rest | {"tool_calls": message.get("tool_calls")}

    def _delta(self, delta: Json) -> Iterator[ModelEvent]:
        for field in _REASONING:
            if thought := text_of(delta.get(field)):
                self._reasoning = field
                yield ReasoningDelta(thought)
                break
        content = delta.get("content")
        if isinstance(content, list):
            yield from _content_parts(content)
        elif text := text_of(content) or text_of(delta.get("refusal")):
            self._answer_chars += len(text)
            yield AnswerDelta(text)
        calls = delta.get("tool_calls")
        for call in [calls] if isinstance(calls, dict) else list_of(calls):
            yield from self._calls.read(object_of(call))
        if not calls and (function := object_of(delta.get("function_call"))):  # deprecated field for one call
            yield from self._calls.read({"index": 0, "function": function})


def _content_parts(parts: list[Any]) -> Iterator[ModelEvent]:
    """Yield the model events for message content that is a list, as Mistral sends it."""
    for part in map(object_of, parts):
        if part.get("type") == "thinking":
            thought = "".join(text_of(object_of(chunk).get("text")) for chunk in list_of(part.get("thinking")))
            if thought:
                yield ReasoningDelta(thought)
        elif text := text_of(part.get("text")):
            yield AnswerDelta(text)


def _usage(usage: Json) -> Usage:
    prompt, completion = (
        object_of(usage.get("prompt_tokens_details")),
        object_of(usage.get("completion_tokens_details")),
    )
    return Usage(
        input=count_of(usage.get("prompt_tokens")),
        output=count_of(usage.get("completion_tokens")),
        cached=count_of(prompt.get("cached_tokens")),
        reasoning=count_of(completion.get("reasoning_tokens")),
    )


def _messages(request: ModelRequest, endpoint: str) -> list[Json]:
    messages: list[Json] = [{"role": "system", "content": request.system}] if request.system else []
    last_user_index = _last_prompt(request.messages)
    images: list[Image] = []
    for index, message in enumerate(request.messages):
        if images and not isinstance(message, ToolResult):
            messages.append(_user(images))
            images = []
        match message:
            case UserMessage():
                _add_user(messages, message.parts)
            case AssistantMessage():
                messages.append(_assistant(message, endpoint, with_reasoning=index > last_user_index))
            case ToolResult():
                messages.append({"role": "tool", "tool_call_id": message.call_id, "content": message.content})
                images += message.images  # tool messages cannot contain images
    return messages + ([_user(images)] if images else [])


def _last_prompt(messages: Sequence[Message]) -> int:
    """Return the index of the last user message of a chat request, or -1 if none."""
    return max((index for index, message in enumerate(messages) if isinstance(message, UserMessage)), default=-1)


def _add_user(messages: list[Json], parts: Sequence[Part]) -> None:
    """Append a user message with the content `parts` to `messages`."""
    # If the last message is also a user message, the content is appended to it, because chat templates expect
    # alternating roles.
    message = _user(parts)
    if not messages or messages[-1]["role"] != "user":
        messages.append(message)
    elif isinstance(message["content"], str) and isinstance(messages[-1]["content"], str):
        messages[-1]["content"] += f"\n\n{message['content']}"
    else:
        messages[-1]["content"] = _listed(messages[-1]["content"]) + _listed(message["content"])


def _user(parts: Sequence[Part]) -> Json:
    if all(isinstance(part, Text) for part in parts):
        return {"role": "user", "content": "\n\n".join(part.text for part in parts if isinstance(part, Text))}
    return {"role": "user", "content": [_part(part) for part in parts]}


def _part(part: Part) -> Json:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": {"url": f"data:{part.mime_type};base64,{part.data}"}}


def _listed(content: Any) -> list[Json]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _assistant(message: AssistantMessage, endpoint: str, *, with_reasoning: bool) -> Json:
    turn: Json = {"role": "assistant", "content": message.text}
    if message.calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    extras = object_of(message.extras.get(NAME))
    if with_reasoning and extras.get("endpoint") == endpoint and extras.get("reasoning") in _REASONING:
        turn[extras["reasoning"]] = message.reasoning  # models that reason between calls expect their reasoning back
    return turn
