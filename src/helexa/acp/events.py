"""Events of an agent run with stable ids, independent of the protocol version."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from helexa.acp.history import Card, PlanEntry

CallStatus = Literal["pending", "in_progress", "completed", "failed"]
CompactionStatus = Literal["in_progress", "completed", "failed", "cancelled"]
StopReason = Literal["end_turn", "max_tokens", "max_turn_requests", "refusal", "cancelled"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A part of the assistant's text."""

    message_id: str
    text: str


@dataclass(frozen=True, slots=True)
class ThoughtDelta:
    """A part of the model's reasoning."""

    message_id: str
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call started, and its name is known. `arguments` is None if they are not parsed yet or are invalid."""

    call_id: str
    name: str
    card: Card
    arguments: dict[str, Any] | None = None
    status: CallStatus = "pending"


@dataclass(frozen=True, slots=True)
class CallChanged:
    """A tool call progressed or ended.

    A field that is None has not changed. `card`, the call's display in the editor, replaces the previous card.

    Attributes:
        output: result text for the model, once the call has ended.
    """

    call_id: str
    status: CallStatus | None = None
    card: Card | None = None
    arguments: dict[str, Any] | None = None
    output: str | None = None


@dataclass(frozen=True, slots=True)
class PlanChanged:
    """The plan changed. `entries` is the complete new plan."""

    entries: tuple[PlanEntry, ...]


@dataclass(frozen=True, slots=True)
class UsageChanged:
    """Context usage after a round.

    Attributes:
        used: tokens in the context: the last prompt and its answer.
        size: context size in tokens, or None if unknown.
        cost: cost of this round in US dollars, or None if prices are unknown.
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
    """A message to the user outside the conversation, for example about a retry."""

    text: str
    severity: Literal["info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True)
class CompactionChanged:
    """The status of a compaction changed. `summary` is set if it is `completed`, `error` if it is `failed`."""

    compaction_id: str
    status: CompactionStatus
    summary: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CompactionDelta:
    """A part of the summary that a compaction streams from the model."""

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
"""Callback that receives events in order; awaiting it waits until the client has read earlier messages."""
