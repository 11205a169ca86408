"""Types of a conversation: stored messages, and events for the editor.

Later versions of the agent must read the sessions that older versions saved. So new fields of stored types need a
default, and fields are never renamed.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import Struct

_encoder = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """Return a message or event as one line of JSON that ends with a line break."""
    try:
        # UTF-8 cannot encode lone surrogates. If there are any, they are replaced by U+FFFD below.
        return _encoder.encode(value) + b"\n"
    except UnicodeEncodeError:
        return _encoder.encode(_without_lone_surrogates(msgspec.to_builtins(value))) + b"\n"


def sendable(value: Any) -> Any:
    """Return the JSON data `value`, with U+FFFD in place of lone surrogates."""
    try:
        _encoder.encode(value)
    except UnicodeEncodeError:
        return _without_lone_surrogates(msgspec.to_builtins(value))
    return value


def _without_lone_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case dict():
            return {_without_lone_surrogates(key): _without_lone_surrogates(member) for key, member in value.items()}
        case list() | tuple():
            return [_without_lone_surrogates(member) for member in value]
        case _:
            return value


ToolKind = Literal["read", "edit", "delete", "move", "search", "execute", "think", "fetch", "switch_mode", "other"]
PlanStatus = Literal["pending", "in_progress", "completed"]
PlanPriority = Literal["high", "medium", "low"]


class Text(Struct, frozen=True, tag="text"):
    """A text part of a message."""

    text: str


class Image(Struct, frozen=True, tag="image"):
    """An image in a message of the conversation: `data` in base64, and the media type."""

    mime_type: str
    data: str
    uri: str | None = None


Part = Text | Image


class Location(Struct, frozen=True):
    """A file that a tool call reads or changes, and optionally a line in the file.

    The path is absolute. Line numbers begin at 1; None means the whole file.
    """

    path: str
    line: int | None = None


class Diff(Struct, frozen=True, tag="diff"):
    """The display of a change that a tool call makes to a file.

    `old` is the file's text before the change, or None if the call creates the file.
    """

    path: str
    old: str | None
    new: str


class Terminal(Struct, frozen=True, tag="terminal"):
    """The display of a command's live output in a terminal of the editor.

    The terminal disappears after the command ends. The output remains as text in the `ToolResult`.
    """

    terminal_id: str


CardContent = Text | Image | Diff | Terminal


class Card(Struct, frozen=True):
    """The display of a tool call in the editor."""

    title: str  # one line for the user
    kind: ToolKind = "other"  # kind of tool, which determines the icon
    locations: tuple[Location, ...] = ()  # files that the call reads or changes. Editors may open these files.
    content: tuple[CardContent, ...] = ()  # content that the editor shows when the user expands the tool call


class PlanEntry(Struct, frozen=True):
    """One task of the agent's plan."""

    content: str
    status: PlanStatus = "pending"
    priority: PlanPriority = "medium"


class ToolCall(Struct, frozen=True):
    """A tool call by the model. `arguments` is JSON text, which may be invalid."""

    id: str
    name: str
    arguments: str


class UserMessage(Struct, frozen=True, tag="user"):
    """A message with the role `user` in the agent's conversation.

    If `hidden`, the agent wrote the message itself, and the editor does not show it when a session is loaded.
    """

    id: str
    parts: tuple[Part, ...]
    hidden: bool = False


class AssistantMessage(Struct, frozen=True, tag="assistant"):
    """One response of the model."""

    id: str  # message id, unique in the session. The chunks sent to the editor have this id as `messageId`.
    text: str = ""  # text of the response
    reasoning: str = ""  # reasoning text that the endpoint returned
    calls: tuple[ToolCall, ...] = ()  # tool calls. For each call, a `ToolResult` follows in the history.
    # Data that later requests send back to the endpoint unchanged, for example signed thinking blocks. The keys are API
    # formats. The client of each API format reads only the data under its key.
    extras: dict[str, Any] = {}
    partial: bool = False  # whether the response is incomplete because the user canceled it or the stream broke off


class ToolResult(Struct, frozen=True, tag="tool_result"):
    """The result of a tool call."""

    call_id: str  # id of the call in the preceding assistant message
    content: str  # text for the model. If the call failed, the text contains the reason.
    failed: bool = False  # whether the call failed
    images: tuple[Image, ...] = ()  # images for the model, after the content
    card: Card | None = None  # final display of the call in the editor, shown again when the session is loaded
    plan: tuple[PlanEntry, ...] | None = None  # the complete new plan if the call changed the agent's plan, else None


class Summary(Struct, frozen=True, tag="summary"):
    """A summary of the conversation.

    In requests to the model, `text` replaces all earlier messages, except the last `kept` messages before the summary.
    """

    id: str
    text: str
    kept: int = 0


class Cleared(Struct, frozen=True, tag="cleared"):
    """A history entry: the model no longer sees the messages before this entry."""

    id: str


Message = UserMessage | AssistantMessage | ToolResult | Summary | Cleared


CallStatus = Literal["pending", "in_progress", "completed", "failed"]
CompactionStatus = Literal["in_progress", "completed", "failed", "cancelled"]
StopReason = Literal["end_turn", "max_tokens", "max_turn_requests", "refusal", "cancelled"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """An event of the agent: a chunk of the text that the model streams to the user."""

    message_id: str
    text: str


@dataclass(frozen=True, slots=True)
class ThoughtDelta:
    """An event of the agent: a chunk of the model's reasoning."""

    message_id: str
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """An event of the agent: a tool call, or a question shown like one, begins."""

    call_id: str
    name: str
    card: Card  # display of the call in the editor
    arguments: dict[str, Any] | None = None  # parsed arguments, or None if the arguments are incomplete or invalid
    status: CallStatus = "pending"


@dataclass(frozen=True, slots=True)
class CallChanged:
    """An event of the agent: a tool call progressed.

    A field that is None has not changed.
    """

    call_id: str
    status: CallStatus | None = None
    card: Card | None = None  # new display of the call in the editor, which replaces the previous display
    arguments: dict[str, Any] | None = None
    output: str | None = None  # result text for the model, set when the call has ended


@dataclass(frozen=True, slots=True)
class PlanChanged:
    """An event of the agent: the plan (task list) changed to `entries`."""

    entries: tuple[PlanEntry, ...]


@dataclass(frozen=True, slots=True)
class UsageChanged:
    """An event of the agent: the context usage after a model response."""

    used: int  # tokens of the last request and its response
    size: int | None  # context size in tokens, or None if unknown
    cost: float | None = None  # cost of the request and the response in US dollars, or None if the prices are unknown


@dataclass(frozen=True, slots=True)
class TitleChanged:
    """An event of the agent: the session has a new short title."""

    title: str


@dataclass(frozen=True, slots=True)
class Notice:
    """An event of the agent: a message to the user, for example about a retry."""

    text: str
    severity: Literal["info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True)
class CompactionChanged:
    """An event of the agent: the status of a compaction (summary) changed."""

    compaction_id: str
    status: CompactionStatus
    summary: str | None = None  # the summary if the status is `completed`, else None
    error: str | None = None  # the error message if the status is `failed`, else None


@dataclass(frozen=True, slots=True)
class CompactionDelta:
    """An event of the agent: a chunk of the summary that the model streams."""

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
"""Callback that sends an event to the editor.

A call also waits until the editor has read earlier messages.
"""
