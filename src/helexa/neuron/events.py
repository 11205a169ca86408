"""Output events of a run, independent of the API format. A run generates one answer to one request.

A run yields `Started`, any number of `OutputEvent`, then `Finished` or `Failed`. If the caller requests prompt counts,
`PromptCounted` comes before the first `OutputEvent`.

If a request has several answers, each event is wrapped in `OfChoice`, which names the answer. At the end, an unwrapped
`Finished` carries the totals of all answers.
"""

from typing import Literal

import msgspec

from helexa.core.errors import ApiError

FinishReason = Literal["stop", "length", "tool_calls"]

Alternative = tuple[str, bytes, float]
"""Text of a token, bytes of the token, log-probability."""


class Started(msgspec.Struct, frozen=True):
    """First event of a run: the request was admitted."""

    prompt_tokens: int


class PromptCounted(msgspec.Struct, frozen=True):
    """The engine has begun the prefill and found `cached_tokens` of the `prompt_tokens` tokens in the KV cache."""

    prompt_tokens: int
    cached_tokens: int


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of one token, and the most likely tokens at the token's position."""

    token: str
    bytes: bytes
    logprob: float
    top: tuple[Alternative, ...] = ()


class PromptScores(msgspec.Struct, frozen=True):
    """Log-probabilities of the prompt's tokens. `logprob` and `top` of the first token are meaningless placeholders."""

    tokens: tuple[TokenLogprob, ...]


class TextDelta(msgspec.Struct, frozen=True):
    """The next piece of the answer's text, in whole characters.

    `logprobs` has one entry per token if the request asks for log-probabilities. `text` is empty only at the end of the
    answer, to report log-probabilities of tokens without text.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class ReasoningDelta(msgspec.Struct, frozen=True):
    """The next piece of the model's reasoning; never empty."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """The model begins a tool call. `index` counts the calls of the answer from 0.

    Following `ToolCallDelta` events belong to this call, up to the next `ToolCallStart`.
    """

    index: int
    id: str
    name: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """The next piece of a tool call's arguments; never empty. All pieces of a call, joined, are the text of one JSON
    object.
    """

    index: int
    arguments: str


class WasReasoning(msgspec.Struct, frozen=True):
    """All answer text before this event is reasoning: the model closed a reasoning block that had no opening marker.

    Text that was already streamed to the client cannot be changed.
    """


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The answer is complete.

    `reason` is `stop` if the model or a stop string ended the answer, `length` if the answer reached its limit, and
    `tool_calls` if the model waits for results of its tool calls.

    The engine found `cached_tokens` of the `prompt_tokens` in the KV cache and did not compute them again.
    `completion_tokens` includes the `reasoning_tokens`. `stop_string` is the stop string that ended the answer, or
    None.
    """

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prefill_ms: float
    decode_ms: float
    stop_string: str | None = None
    reasoning_tokens: int = 0


class Failed(msgspec.Struct, frozen=True):
    """The run failed; the answer is incomplete."""

    error: ApiError


OutputEvent = PromptScores | TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | WasReasoning


class OfChoice(msgspec.Struct, frozen=True):
    """Wraps an event of one answer if a request has several answers; `index` is the number of the answer."""

    index: int
    event: OutputEvent | Finished


InferenceEvent = Started | PromptCounted | OutputEvent | OfChoice | Finished | Failed
