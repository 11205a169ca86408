"""What an agent run says, with stable ids and in no dialect of the protocol."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from helexa.acp.history import Card, PlanEntry

CallStatus = Literal["pending", "in_progress", "completed", "failed"]
CompactionStatus = Literal["in_progress", "completed", "failed", "cancelled"]
StopReason = Literal["end_turn", "max_tokens", "max_turn_requests", "refusal", "cancelled"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of what the assistant says."""

    message_id: str
    text: str


@dataclass(frozen=True, slots=True)
class ThoughtDelta:
    """More of what the model thinks."""

    message_id: str
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call is known by name; `arguments` are None where they cannot be read."""

    call_id: str
    name: str
    card: Card
    arguments: dict[str, Any] | None = None
    status: CallStatus = "pending"


@dataclass(frozen=True, slots=True)
class CallChanged:
    """A tool call goes on or ends. What is None stays as it was; a card replaces the one before.

    Attributes:
        output: what the model is told, once the call has ended.
    """

    call_id: str
    status: CallStatus | None = None
    card: Card | None = None
    arguments: dict[str, Any] | None = None
    output: str | None = None


@dataclass(frozen=True, slots=True)
class PlanChanged:
    """The whole plan, as it is now."""

    entries: tuple[PlanEntry, ...]


@dataclass(frozen=True, slots=True)
class UsageChanged:
    """How full the context is, after a round.

    Attributes:
        used: tokens in context now: the last prompt and its answer.
        size: tokens that fit; None where nobody knows it.
        cost: US dollars that this round cost; None where no price is known.
    """

    used: int
    size: int | None
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class TitleChanged:
    """A short title for the session."""

    title: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the user should know that is no part of the conversation, such as a retry."""

    text: str
    severity: Literal["info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True)
class CompactionChanged:
    """The history is being summed up, or that ended; `summary` comes with `completed`, `error` with `failed`."""

    compaction_id: str
    status: CompactionStatus
    summary: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CompactionDelta:
    """More of the summary that is being written."""

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
"""Says an event to whom it concerns, in order; waits while the client does not read."""
