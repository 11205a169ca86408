"""What a run of the engine says, in no dialect: `Started`, any number of `OutputEvent`, then `Finished` or `Failed`.

Runs that are asked to count their prompt say `PromptCounted` before the first `OutputEvent`.

Where several answers to one prompt were asked for, `OfChoice` says whose each event is, and a last `Finished` speaks of
all.
"""

from typing import Literal

import msgspec

from helexa.core.errors import ApiError

FinishReason = Literal["stop", "length", "tool_calls"]

Alternative = tuple[str, bytes, float]
"""Text and bytes of a token, and its log-probability."""


class Started(msgspec.Struct, frozen=True):
    """The request was admitted."""

    prompt_tokens: int


class PromptCounted(msgspec.Struct, frozen=True):
    """The engine has begun to read the prompt: `cached_tokens` of its `prompt_tokens` were found in the KV cache."""

    prompt_tokens: int
    cached_tokens: int


class TokenLogprob(msgspec.Struct, frozen=True):
    """How likely a token of the answer was, and the likeliest in its place."""

    token: str
    bytes: bytes
    logprob: float
    top: tuple[Alternative, ...] = ()


class PromptScores(msgspec.Struct, frozen=True):
    """The log-probabilities of the prompt's tokens. The first token has none: its `logprob` and `top` mean nothing."""

    tokens: tuple[TokenLogprob, ...]


class TextDelta(msgspec.Struct, frozen=True):
    """The next piece of the answer: never half a character. `logprobs` are of its tokens, if asked for.

    It is empty only at the end, for tokens without text that are reported all the same.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class ReasoningDelta(msgspec.Struct, frozen=True):
    """The next piece of what the model thinks before it answers: never empty."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """The model calls a tool. `index` counts the answer's calls from 0; the deltas until the next start are of this."""

    index: int
    id: str
    name: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """The next piece of a call's arguments, which together are the text of one JSON object: never empty."""

    index: int
    arguments: str


class WasReasoning(msgspec.Struct, frozen=True):
    """The text so far was what the model thinks, as shows only here, at its end. A stream cannot take it back."""


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The answer is complete. `stop`: the model or a stop string ended it; `length`: it reached its limit;
    `tool_calls`: the model ended it to have its calls answered.

    `cached_tokens` of the `prompt_tokens` were found in the KV cache and not computed again. `reasoning_tokens` are
    part of the `completion_tokens`. `stop_string` is the one that ended the answer, if one did.
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
    """The answer ends here, incomplete."""

    error: ApiError


OutputEvent = PromptScores | TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | WasReasoning


class OfChoice(msgspec.Struct, frozen=True):
    """What one of several answers says."""

    index: int
    event: OutputEvent | Finished


InferenceEvent = Started | PromptCounted | OutputEvent | OfChoice | Finished | Failed
