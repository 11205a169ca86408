"""The protocol of API formats."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from helexa.bench.measurement.prompt_request import PromptRequest
from helexa.bench.measurement.request_record import DeltaKind, ToolCall
from helexa.core.sse import ServerSentEvent


class StreamFault(Exception):
    """The stream contains an error or invalid data."""


@dataclass(slots=True)
class Answer:
    """The answer as received so far.

    Attributes:
        text: parts of the text.
        reasoning: parts of the reasoning.
        calls: tool calls by index.
        finish_reason: finish reason, or None before the end.
        ended: whether the stream has ended the answer.
        counted: completion tokens so far, if the server reports them with each chunk.
        prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens: token counts, or None if not reported.
        prefill_s, decode_s, queue_s: durations in seconds, or None if not reported.
    """

    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: dict[int, ToolCall] = field(default_factory=dict[int, ToolCall])
    finish_reason: str | None = None
    ended: bool = False
    counted: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    queue_s: float | None = None

    def add_call(self, index: int, name: str, arguments: str) -> bool:
        """Add a part of a call; return whether the part is not empty."""
        known = self.calls.get(index, ToolCall("", ""))
        self.calls[index] = ToolCall(known.name + name, known.arguments + arguments)
        return bool(name or arguments)


class Dialect(Protocol):
    """One API format.

    Attributes:
        path: path of requests.
        substitutes: parameters that some models reject, with the name of the replacement, or None to omit the
            parameter.
    """

    path: str
    substitutes: Mapping[str, str | None]

    def headers(self, bearer: str | None) -> dict[str, str]:
        """Return the headers of every request."""
        ...

    def body(self, prompt: PromptRequest, *, ignore_eos: bool) -> dict[str, Any]:
        """Return the request body; `ignore_eos` is whether the server supports this field."""
        ...

    def take(self, event: ServerSentEvent, answer: Answer) -> DeltaKind | None:
        """Add a stream event to the answer; return the kind of its content, or None without content.

        Raises:
            StreamFault: the event reports a failure or is invalid.
        """
        ...


def number(value: object) -> int | None:
    """Return `value` if it is a valid count, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def seconds(milliseconds: object) -> float | None:
    """Return milliseconds as seconds, or None for an invalid value."""
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, (int, float)) or not 0 <= milliseconds < 1e12:
        return None
    return milliseconds / 1000


def text(value: object) -> str:
    """Return `value` if it is a string, else an empty string."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> dict[str, Any]:
    """Return `value` if it is an object, else an empty object."""
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def fault_text(error: object) -> str:
    """Return the message of an error in a stream."""
    return (text(error) or text(mapping(error).get("message")) or "the stream carries an error")[:500]
