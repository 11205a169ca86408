"""Response bodies of OpenAI chat completions."""

from typing import Literal, NotRequired, TypedDict

import orjson

from helexa.core.wire.usage import Usage


class CalledFunction(TypedDict):
    """The called function. The arguments are the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Alternative(TypedDict):
    """A token and its log-probability. `bytes` are its raw bytes, `token` is the readable text."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Alternative):
    """A token of the completion, and the most likely tokens at its position."""

    top_logprobs: list[Alternative]


class ChatLogprobs(TypedDict):
    """Log-probabilities of the text's tokens; `content` is a list of `ChatToken` in JSON."""

    content: orjson.Fragment
    refusal: None


class ChatAnswer(TypedDict):
    """The assistant's message. `content` is null if the message has only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One completion."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: NotRequired[str]


class ChatCompletion(TypedDict):
    """The body of a non-streaming response."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(TypedDict, total=False):
    """A chunk's addition to a call: the function's name, or the next characters of the arguments."""

    name: str
    arguments: str


class ToolCallDelta(TypedDict, total=False):
    """A chunk's addition to a call. Only the first chunk of a call has `id`, `type` and the function's name."""

    index: int
    id: str
    type: Literal["function"]
    function: FunctionDelta


class ChatDelta(TypedDict, total=False):
    """A chunk's addition to the assistant's message."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(TypedDict):
    """A chunk's addition to one completion."""

    index: int
    delta: ChatDelta
    logprobs: NotRequired[ChatLogprobs]
    finish_reason: str | None
    stop_reason: NotRequired[str]


class ChatChunk(TypedDict):
    """One event of a streaming response.

    With `stream_options.include_usage`, the last event has the usage and no choices, and `usage` is null in all other
    events.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
