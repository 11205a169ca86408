"""One request as the client saw it: raw moments on a monotonic clock, and what the server said of it."""

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "rejected", "timeout", "error", "incomplete", "cancelled"]
"""How a request ended: answered in full; refused with 429 or 503; over the time allowed; refused otherwise or never
reached; broken off in the middle of the answer; cancelled by the bench itself, on purpose."""

Role = Literal["load", "probe", "turn"]
"""What a request was for: load that is measured; a small one beside it; a turn of a conversation."""

DeltaKind = Literal["text", "reasoning", "tool"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A chunk with text, reasoning or a piece of a tool call that is not empty.

    Attributes:
        at: when it had come, in seconds of the client's clock.
        tokens: completion tokens until its end, where the server says so with each chunk.
    """

    at: float
    kind: DeltaKind
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wrote; `arguments` is text, as it came."""

    name: str
    arguments: str


@dataclass(slots=True)
class RequestRecord:
    """A request and its answer.

    Attributes:
        scheduled: when it was to be sent; without a schedule, when it was sent.
        sent: just before its bytes went out.
        ended: when the answer was over, or given up.
        prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens: as the server reports them, or None.
        prefill_s, decode_s, queue_s: as the server reports them, or None.
        text, reasoning, tool_calls: the answer.
    """

    scheduled: float
    sent: float
    ended: float
    status: Status
    role: Role = "load"
    http_status: int | None = None
    error: str | None = None
    finish_reason: str | None = None
    deltas: list[Delta] = field(default_factory=list[Delta])
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    queue_s: float | None = None
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])
