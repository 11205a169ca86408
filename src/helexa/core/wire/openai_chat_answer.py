"""Response bodies of OpenAI's chat completions API."""

from typing import Literal, NotRequired, TypedDict

import orjson

from helexa.core.wire.usage import Usage


class CalledFunction(TypedDict):
    """The function of a tool call. The arguments are a JSON object as text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One tool call in the assistant's message."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Alternative(TypedDict):
    """A token and its log-probability. `bytes` are its raw bytes, `token` is the readable text."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Alternative):
    """A token of the completion with its log-probability, and the most likely tokens at the same position."""

    top_logprobs: list[Alternative]


class ChatLogprobs(TypedDict):
    """Log-probabilities of the text tokens in a completion. `content` is a JSON-encoded list of `ChatToken`."""

    content: orjson.Fragment
    refusal: None


class ChatAnswer(TypedDict):
    """The assistant's message in a response. `content` is null if the message has only tool calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One completion of a non-streaming response."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: NotRequired[str]


class ChatCompletion(TypedDict):
    """The body of a non-streaming response to a chat request."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(TypedDict, total=False):
    """The `function` of a tool-call delta: the function's name, or the next characters of the arguments."""

    name: str
    arguments: str


class ToolCallDelta(TypedDict, total=False):
    """A delta of a tool call. Only the first delta of a call has `id`, `type` and the function's name."""

    index: int
    id: str
    type: Literal["function"]
    function: FunctionDelta


class ChatDelta(TypedDict, total=False):
    """A delta of the assistant's message in a streamed chunk."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(TypedDict):
    """One completion's part of a streamed chunk: a delta, and the finish reason at the end."""

    index: int
    delta: ChatDelta
    logprobs: NotRequired[ChatLogprobs]
    finish_reason: str | None
    stop_reason: NotRequired[str]


class ChatChunk(TypedDict):
    """One event (chunk) of a streaming response to a chat request.

    With `stream_options.include_usage`, the last event has `usage` and no choices. In all other events, `usage` is
    null.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
