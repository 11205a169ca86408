"""The record of one request: times measured by the client, and values reported by the server."""

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "rejected", "timeout", "error", "incomplete", "cancelled"]
"""Result of a request.

* `ok`: the response is complete.
* `rejected`: the server was overloaded and returned status 429, 503 or 529.
* `timeout`: the request exceeded its time limit.
* `error`: the server returned another error status, or could not be reached.
* `incomplete`: the response began but did not end properly.
* `cancelled`: the benchmark canceled the request on purpose.
"""

Role = Literal["load", "probe", "turn"]
"""Purpose of a request within the benchmark load.

* `load`: the request generates load.
* `probe`: the request measures latency while other requests generate load.
* `turn`: the request continues a conversation.
"""

DeltaKind = Literal["text", "reasoning", "tool"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A received chunk with text, reasoning or part of a tool call.

    Attributes:
        at: arrival time on the client's clock, in seconds.
        kind: kind of the content.
        tokens: completion tokens so far, or None if the server does not report them with each chunk.
    """

    at: float
    kind: DeltaKind
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model. `arguments` is the JSON text as received."""

    name: str
    arguments: str


@dataclass(slots=True)
class RequestRecord:
    """The times and the response of one request. Times are seconds on the client's monotonic clock.

    Attributes:
        scheduled: time at which the request should be sent. Equal to `sent` if the request has no schedule.
        sent: time just before the request was sent.
        ended: time at which the response ended or failed.
        prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens: counts reported by the server, or None.
        prefill_s, decode_s, queue_s: durations in seconds reported by the server, or None.
        text, reasoning, tool_calls: content of the response.
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
