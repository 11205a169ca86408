"""Events that the agent emits for the editor while it works, independent of the protocol version."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from helexa.acp.history import Card, PlanEntry

CallStatus = Literal["pending", "in_progress", "completed", "failed"]
CompactionStatus = Literal["in_progress", "completed", "failed", "cancelled"]
StopReason = Literal["end_turn", "max_tokens", "max_turn_requests", "refusal", "cancelled"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A chunk of the text that the model streams to the user."""

    message_id: str
    text: str


@dataclass(frozen=True, slots=True)
class ThoughtDelta:
    """A chunk of the model's reasoning."""

    message_id: str
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """The model began to write a tool call, and the name of the tool is already known.

    Attributes:
        card: display of the call in the editor.
        arguments: parsed arguments, or None if the arguments are incomplete or invalid.
    """

    call_id: str
    name: str
    card: Card
    arguments: dict[str, Any] | None = None
    status: CallStatus = "pending"


@dataclass(frozen=True, slots=True)
class CallChanged:
    """A tool call progressed or ended. A field that is None has not changed.

    Attributes:
        card: new display of the call in the editor, which replaces the previous display.
        output: result text for the model, set when the call has ended.
    """

    call_id: str
    status: CallStatus | None = None
    card: Card | None = None
    arguments: dict[str, Any] | None = None
    output: str | None = None


@dataclass(frozen=True, slots=True)
class PlanChanged:
    """The agent's plan (task list) changed. `entries` is the complete new plan."""

    entries: tuple[PlanEntry, ...]


@dataclass(frozen=True, slots=True)
class UsageChanged:
    """Context usage after a model response.

    Attributes:
        used: tokens of the last request and its response.
        size: context size in tokens, or None if unknown.
        cost: cost of the request and the response in US dollars, or None if the prices are unknown.
    """

    used: int
    size: int | None
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class TitleChanged:
    """The session has a new short title."""

    title: str


@dataclass(frozen=True, slots=True)
class Notice:
    """A message to the user that is not part of the conversation, for example about a retry."""

    text: str
    severity: Literal["info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True)
class CompactionChanged:
    """The status of a compaction changed. In a compaction, the model summarizes the conversation.

    Attributes:
        summary: the summary if the status is `completed`, else None.
        error: the error message if the status is `failed`, else None.
    """

    compaction_id: str
    status: CompactionStatus
    summary: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CompactionDelta:
    """A chunk of the summary that the model streams during a compaction of the conversation."""

    compaction_id: str
    text: str


Event = (
    TextDelta
    | ThoughtDelta
    | CallStarted
    | CallChanged
    | PlanChanged
    | UsageChanged
    | TitleChanged
    | Notice
    | CompactionChanged
    | CompactionDelta
)

Emit = Callable[[Event], Awaitable[None]]
"""Callback that sends an event to the editor. Awaiting it also waits until the editor has read earlier messages."""
