"""The client's record of one request: times on a monotonic clock, and values reported by the server."""

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "rejected", "timeout", "error", "incomplete", "cancelled"]
"""Result of a request.

* `ok`: complete answer
* `rejected`: the server answered with 429, 503 or 529
* `timeout`: over the allowed time
* `error`: any other error response, or the server was not reached
* `incomplete`: the answer broke off
* `cancelled`: canceled on purpose by the benchmark
"""

Role = Literal["load", "probe", "turn"]
"""Purpose of a request: measured load, a small probe during the load, or a turn of a conversation."""

DeltaKind = Literal["text", "reasoning", "tool"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A chunk with non-empty text, reasoning or a part of a tool call.

    Attributes:
        at: arrival time in seconds of the client's clock.
        kind: kind of content.
        tokens: completion tokens so far, if the server reports them with each chunk, else None.
    """

    at: float
    kind: DeltaKind
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call by the model; `arguments` is unparsed text."""

    name: str
    arguments: str


@dataclass(slots=True)
class RequestRecord:
    """A request and its answer.

    Attributes:
        scheduled: scheduled time, or the send time without a schedule.
        sent: time just before the bytes were sent.
        ended: time of the end of the answer, or of its failure.
        prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens: reported by the server, or None.
        prefill_s, decode_s, queue_s: reported by the server, or None.
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
