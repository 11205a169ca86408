"""Output events of a run, independent of the API format.

A run yields `Started`, any number of `OutputEvent`, then `Finished` or `Failed`. If the caller requests prompt counts,
`PromptCounted` comes before the first `OutputEvent`.

If a request has several answers, `OfChoice` names the answer of each event. A last `Finished` carries the totals.
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
    """Prefill has begun: `cached_tokens` of the `prompt_tokens` tokens were found in the KV cache."""

    prompt_tokens: int
    cached_tokens: int


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of an output token, and the most likely tokens at its position."""

    token: str
    bytes: bytes
    logprob: float
    top: tuple[Alternative, ...] = ()


class PromptScores(msgspec.Struct, frozen=True):
    """Log-probabilities of the prompt's tokens. `logprob` and `top` of the first token have no meaning."""

    tokens: tuple[TokenLogprob, ...]


class TextDelta(msgspec.Struct, frozen=True):
    """The next piece of the answer's text, in whole characters. `logprobs` has one entry per token if requested.

    `text` is empty only at the end of the answer, to report tokens without text.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class ReasoningDelta(msgspec.Struct, frozen=True):
    """The next piece of the model's reasoning; never empty."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """The model calls a tool. `index` counts the answer's calls from 0. Following deltas belong to this call."""

    index: int
    id: str
    name: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """The next piece of a call's arguments; never empty. All pieces together are the text of one JSON object."""

    index: int
    arguments: str


class WasReasoning(msgspec.Struct, frozen=True):
    """The text so far is reasoning, because the model closed a reasoning block that it never opened.

    Text that was already streamed cannot be changed.
    """


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The answer is complete.

    `reason` is `stop` if the model or a stop string ended the answer, `length` if the answer reached its limit, and
    `tool_calls` if the model waits for results of its tool calls.

    `cached_tokens` of the `prompt_tokens` were found in the KV cache and not computed again. `reasoning_tokens` are
    part of the `completion_tokens`. `stop_string` is the stop string that ended the answer, or None.
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
    """An event of one answer of a request with several answers."""

    index: int
    event: OutputEvent | Finished


InferenceEvent = Started | PromptCounted | OutputEvent | OfChoice | Finished | Failed
