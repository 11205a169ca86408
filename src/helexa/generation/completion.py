"""Results of a prompt: the pieces of an answer during generation, and the completion at the end."""

from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer, never empty. `thought` marks reasoning, which is not part of the answer's text."""

    text: str
    thought: bool = False

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts. `prompt` includes `cached` tokens; `completion` includes `reasoning` tokens."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations of a request, in seconds.

    Attributes:
        load_s: waiting for the model to load; 0 if it was already loaded.
        queue_s: waiting for other requests, after the load.
        prefill_s: processing (prefill) of the prompt.
        ttft_s: from the call to the first token, including load, queue and prefill.
        decode_s: from the first token to the last token.
        total_s: from the call to the end.
    """

    load_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An answer. `str()` of a completion is its text.

    Attributes:
        text: the answer without reasoning.
        reasoning: reasoning text before the answer, or an empty string.
        finish_reason: `stop`: the answer is complete; `length`: the answer reached its token limit; `tool_calls`: the
            answer ended with tool calls.
        usage: token counts.
        timings: durations.
        model: id of the model.
        seed: random seed of the answer; the same seed and prompt reproduce the answer.
        device, dtype: device and data type of the computation, or None if the server does not report them.
        parsed: the parsed answer if a schema was given: an instance of the pydantic model, or plain JSON values.
        others: the second and later answers if the caller requested several answers; see `choices`.
    """

    text: str
    reasoning: str = ""
    finish_reason: FinishReason = "stop"
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    model: str = ""
    seed: int = 0
    device: str | None = None
    dtype: str | None = None
    parsed: Any = None
    others: "tuple[Completion, ...]" = ()

    def __str__(self) -> str:
        return self.text

    @property
    def choices(self) -> "tuple[Completion, ...]":
        """All requested answers, beginning with this answer."""
        return (self, *self.others)

    @property
    def tok_s(self) -> float:
        """Decoded tokens per second, or 0 if unknown."""
        decoded = self.usage.completion - 1
        return decoded / self.timings.decode_s if decoded > 0 and self.timings.decode_s > 0 else 0.0
