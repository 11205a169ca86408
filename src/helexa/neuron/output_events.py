"""Output events of a run, independent of the API format.

A run generates one answer (OpenAI: choice) to one request.

A run yields `Started`, any number of `OutputEvent`, then `Finished` or `Failed`. If the caller requests prompt counts,
`PromptCounted` comes before the first `OutputEvent`.

If a request has several answers, several runs generate them, and the events of these runs are merged into one stream.
In this stream, the `OutputEvent` and `Finished` events are wrapped in `ChoiceEvent`, which contains the answer's index.
The last event is a `Finished` that is not wrapped. It contains the total token counts.
"""

from typing import Literal

import msgspec

from helexa.core.errors import ApiError
from helexa.core.wire.usage_and_encoded_lists import CacheMiss

FinishReason = Literal["stop", "length", "tool_calls"]

Alternative = tuple[str, bytes, float]  # a candidate token: its text, its bytes and its log-probability


class Started(msgspec.Struct, frozen=True):
    """The first output event: a request with `prompt_tokens` tokens was admitted."""

    prompt_tokens: int


class PromptCounted(msgspec.Struct, frozen=True):
    """An output event: the prefill has begun. `cached_tokens` tokens need no prefill."""

    prompt_tokens: int
    cached_tokens: int


class TokenLogprob(msgspec.Struct, frozen=True):
    """In output events: a token's log-probability, and alternatives at its position.

    `offset` is the number of characters of the answer's text before the character that the token begins or continues.
    """

    token: str
    bytes: bytes
    logprob: float
    top: tuple[Alternative, ...] = ()
    offset: int = 0


class PromptScores(msgspec.Struct, frozen=True):
    """An output event: log-probabilities of the prompt's tokens.

    The first token has no log-probability. Its `logprob` and `top` are placeholders without meaning.
    """

    tokens: tuple[TokenLogprob, ...]


class TextDelta(msgspec.Struct, frozen=True):
    """An output event: the next chunk of text, which ends between characters.

    `logprobs` has one entry per token of `text` if the client requested log-probabilities. `text` is empty only in the
    last chunk of an answer, if it reports the log-probabilities of tokens without text.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class ReasoningDelta(msgspec.Struct, frozen=True):
    """An output event: the next chunk of the model's reasoning, never empty."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """An output event: the model began a call of the tool `name`.

    `index` counts the answer's calls from 0. The next `ToolCallDelta` events contain the arguments of this call.
    """

    index: int
    id: str
    name: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """An output event: the next chunk of a tool call's arguments, never empty.

    All chunks of a call together are the text of one JSON object. `index` is the call's position among the answer's
    calls.
    """

    index: int
    arguments: str


class WasReasoning(msgspec.Struct, frozen=True):
    """An output event: all text of the answer before this event is reasoning.

    The event occurs if the model closes a reasoning block that it did not open. A response that is not streamed reports
    the text as reasoning. Text already streamed to a client stays unchanged.
    """


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """An output event: the answer is complete."""

    # `stop` if the model or a stop string ended the answer, `length` if the answer reached its length limit,
    # `tool_calls` if the answer ends with tool calls
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int  # number of generated tokens, including the `reasoning_tokens`
    prefill_ms: float
    decode_ms: float
    stop_string: str | None = None  # the stop string that ended the answer, or None
    reasoning_tokens: int = 0
    image_tokens: int = 0
    miss: CacheMiss | None = None


class Failed(msgspec.Struct, frozen=True):
    """An output event: the run failed with `error`. The answer is incomplete."""

    error: ApiError


OutputEvent = PromptScores | TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | WasReasoning


class ChoiceEvent(msgspec.Struct, frozen=True):
    """An output event of one of several answers, with the answer's index."""

    index: int
    event: OutputEvent | Finished


InferenceEvent = Started | PromptCounted | OutputEvent | ChoiceEvent | Finished | Failed
