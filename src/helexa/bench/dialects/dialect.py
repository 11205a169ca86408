"""What every dialect has to tell the client."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from helexa.bench.measurement.prompt_request import Question
from helexa.bench.measurement.request_record import DeltaKind, ToolCall
from helexa.core.sse import ServerSentEvent


class StreamFault(Exception):
    """The stream carries an error, or what no server of this dialect may send."""


@dataclass(slots=True)
class Answer:
    """What a stream has said so far.

    Attributes:
        ended: it has said that the answer is over.
        counted: completion tokens until here, where the server says so with each chunk.
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
        """Take a piece of a call; whether there was anything in it."""
        known = self.calls.get(index, ToolCall("", ""))
        self.calls[index] = ToolCall(known.name + name, known.arguments + arguments)
        return bool(name or arguments)


class Dialect(Protocol):
    """One way to speak with servers.

    Attributes:
        substitutes: parameters that some models reject; what takes the value of a rejected one, or None to omit it.
    """

    path: str
    substitutes: Mapping[str, str | None]

    def headers(self, bearer: str | None) -> dict[str, str]:
        """Headers of every request."""
        ...

    def body(self, question: Question, *, ignore_eos: bool) -> dict[str, Any]:
        """The request; `ignore_eos` says whether the server knows that field."""
        ...

    def take(self, event: ServerSentEvent, answer: Answer) -> DeltaKind | None:
        """Add an event to the answer; what it carries of it, if anything.

        Raises:
            StreamFault: the event says that the answer failed, or cannot be understood.
        """
        ...


def number(value: object) -> int | None:
    """A count as servers report it; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def seconds(milliseconds: object) -> float | None:
    """A duration as servers report it."""
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, (int, float)) or not 0 <= milliseconds < 1e12:
        return None
    return milliseconds / 1000


def text(value: object) -> str:
    """Text; empty for anything else."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> dict[str, Any]:
    """An object; empty for anything else."""
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def fault_text(error: object) -> str:
    """What an error in a stream says."""
    return (text(error) or text(mapping(error).get("message")) or "the stream carries an error")[:500]
