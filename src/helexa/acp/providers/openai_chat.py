"""The API format of OpenAI chat completions, including the variants of compatible servers."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from helexa.acp.history import AssistantMessage, Image, Message, Part, Text, ToolResult, UserMessage
from helexa.acp.providers.api_format import Json, count_of, list_of, object_of, text_of
from helexa.acp.providers.provider import (
    AnswerDelta,
    CallDelta,
    End,
    FinishReason,
    ModelEvent,
    ModelRequest,
    ReasoningDelta,
    Usage,
)

NAME = "openai-chat"

_FINISH: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "refusal",
}
_REASONING = ("reasoning_content", "reasoning")


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
        """Return the JSON body of `POST /chat/completions` for a model request, without the keys in `rejected`.

        See `ApiFormat`.
        """
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
        """Return the header `x-include-thinking`, or no headers if the thought level is `none`.

        helexa's nodes return reasoning only if this header is set.
        """
        return {} if request.thought_level == "none" else {"x-include-thinking": "true"}

    def reader(self, request: ModelRequest, endpoint: str) -> "ChatReader":
        """Return a new object that converts the chunks of one response to model events; see `ApiFormat`."""
        return ChatReader(endpoint)


class ChatReader:
    """Converts the chunks of one streamed chat completion to model events."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._finish: FinishReason | None = None
        self._usage: Usage | None = None
        self._reasoning: str | None = None  # name of the server's reasoning field
        self._ids: dict[int, str] = {}  # call ids by the index of the call in the response
        self._current: dict[int, int] = {}  # the server's index -> index of the call in the response

    def feed(self, event: Json) -> Iterator[ModelEvent]:
        """Yield the model events that correspond to one chunk; see `Reader`."""
        if usage := object_of(event.get("usage")):
            self._usage = _usage(usage)
        for choice in list_of(event.get("choices"))[:1]:
            choice = object_of(choice)
            yield from self._delta(object_of(choice.get("delta")) or object_of(choice.get("message")))
            if reason := text_of(choice.get("finish_reason")):
                self._finish = _FINISH.get(reason, "stop")

    def end(self) -> Iterator[ModelEvent]:
        """Yield the token counts and the `End` event if the response is complete; see `Reader`."""
        if self._finish is None:
            return
        if self._usage is not None:
            yield self._usage
        reason: FinishReason = "tool_calls" if self._ids and self._finish == "stop" else self._finish
        extras = {"endpoint": self._endpoint, "reasoning": self._reasoning}
        yield End(reason, {NAME: extras} if self._reasoning else {})

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
            yield AnswerDelta(text)
        for call in list_of(delta.get("tool_calls")):
            yield from self._call(object_of(call))

    def _call(self, call: Json) -> Iterator[ModelEvent]:
        function = object_of(call.get("function"))
        name, id = text_of(function.get("name")), text_of(call.get("id"))
        arguments = function.get("arguments")
        text = json.dumps(arguments) if isinstance(arguments, dict) else text_of(arguments)
        server_index = call.get("index")
        position = server_index if isinstance(server_index, int) else -1
        index = self._current.get(position)
        # Some servers send index 0 for all calls, or no index: a new id, or a name without an id, begins a new call.
        if index is None or (id and self._ids[index] and id != self._ids[index]) or (position < 0 and name and not id):
            index = self._current[position] = len(self._ids)
            self._ids[index] = id
            yield CallDelta(index, id or None, name or None, text)
        elif text or name:
            self._ids[index] = self._ids[index] or id
            yield CallDelta(index, id or None, name or None, text)


def _content_parts(parts: list[Any]) -> Iterator[ModelEvent]:
    """Yield the model events for message content that is a list of parts. Mistral's API sends such lists."""
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
    last_user_index = last_prompt(request.messages)
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


def last_prompt(messages: Sequence[Message]) -> int:
    """Return the index of the last user message, or -1 if there is none."""
    return max((index for index, message in enumerate(messages) if isinstance(message, UserMessage)), default=-1)


def _add_user(messages: list[Json], parts: Sequence[Part]) -> None:
    """Append a user message with the content `parts` to the `messages` of a request body.

    If the last message is also a user message, the content is appended to it, because chat templates expect
    alternating roles.
    """
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
