"""OpenAI chat completions: the shapes of the answer."""

from typing import Literal, NotRequired, TypedDict

import orjson

from helexa.core.wire.usage import Usage


class CalledFunction(TypedDict):
    """What is called; the arguments are the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Alternative(TypedDict):
    """A token and its log-probability; `bytes` are its own, `token` is what can be read of them."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Alternative):
    """A token of the answer, and the likeliest ones in its place."""

    top_logprobs: list[Alternative]


class ChatLogprobs(TypedDict):
    """The tokens of the text: a list of `ChatToken`, encoded already."""

    content: orjson.Fragment
    refusal: None


class ChatAnswer(TypedDict):
    """The assistant's turn. `content` is null in a turn of calls only."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: NotRequired[str]


class ChatCompletion(TypedDict):
    """The body of a reply that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(TypedDict, total=False):
    """What is called, or the next piece of the arguments."""

    name: str
    arguments: str


class ToolCallDelta(TypedDict, total=False):
    """What a chunk adds to a call. Only the first one of a call has `id`, `type` and the function's name."""

    index: int
    id: str
    type: Literal["function"]
    function: FunctionDelta


class ChatDelta(TypedDict, total=False):
    """What a chunk adds to the assistant's turn."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(TypedDict):
    """One answer's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: NotRequired[ChatLogprobs]
    finish_reason: str | None
    stop_reason: NotRequired[str]


class ChatChunk(TypedDict):
    """One event of a streamed reply.

    With `stream_options.include_usage`, the last event has the usage and no choices, and `usage` is null in all others.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
