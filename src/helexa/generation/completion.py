"""What comes of a prompt: pieces while it is generated, then the whole of it."""

from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of an answer, never empty; `thought` marks reasoning, which is not part of the answer itself."""

    text: str
    thought: bool = False

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens. `cached` of the `prompt` were not computed again; `reasoning` ones are part of the `completion`."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time went, in seconds.

    Attributes:
        load_s: waiting for the model to load, 0 if it was there.
        queue_s: waiting behind others, once it was.
        prefill_s: reading the prompt.
        ttft_s: from the call to the first token, all of the above included.
        decode_s: from the first token to the last.
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
    """An answer. `str()` of it is its text.

    Attributes:
        reasoning: what the model thought before it answered, empty if nothing.
        finish_reason: `stop`: it was complete; `length`: it reached its limit.
        model: that answered.
        seed: that it was drawn with; the same seed and prompt give the same answer again.
        device, dtype: that it was computed on and in, None where a server does not say.
        parsed: what the text says, if a schema was asked for: an instance of the pydantic model, or plain JSON values.
        others: the further answers, if several were asked for.
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
        """All answers that were asked for, this one first."""
        return (self, *self.others)

    @property
    def tok_s(self) -> float:
        """Tokens per second while it decoded, 0 where that is not known."""
        decoded = self.usage.completion - 1
        return decoded / self.timings.decode_s if decoded > 0 and self.timings.decode_s > 0 else 0.0
