"""A conversation as it is kept: values that are written to the journal and read back, by later versions too.

A field that is added needs a default, and none is ever renamed: journals outlive versions.
"""

from typing import Any, Literal

from msgspec import Struct

ToolKind = Literal["read", "edit", "delete", "move", "search", "execute", "think", "fetch", "switch_mode", "other"]
PlanStatus = Literal["pending", "in_progress", "completed"]
PlanPriority = Literal["high", "medium", "low"]


class Text(Struct, frozen=True, tag="text"):
    """Words of a message."""

    text: str


class Image(Struct, frozen=True, tag="image"):
    """A picture in a message; `data` is base64, `mime_type` as in `image/png`."""

    mime_type: str
    data: str
    uri: str | None = None


Part = Text | Image


class Location(Struct, frozen=True):
    """A place that a tool call touches; the path is absolute, the line counts from 1."""

    path: str
    line: int | None = None


class Diff(Struct, frozen=True, tag="diff"):
    """A change of one file; `old` is None where there was no file."""

    path: str
    old: str | None
    new: str


class Terminal(Struct, frozen=True, tag="terminal"):
    """A terminal of the client, shown live. Nothing of it is left after its process: what it printed is in the text."""

    terminal_id: str


CardContent = Text | Image | Diff | Terminal


class Card(Struct, frozen=True):
    """How a tool call looks in an editor.

    Attributes:
        title: one line for a person.
        kind: what it does, for the icon.
        locations: the files it touches, for following along.
        content: what it shows when it is opened.
    """

    title: str
    kind: ToolKind = "other"
    locations: tuple[Location, ...] = ()
    content: tuple[CardContent, ...] = ()


class PlanEntry(Struct, frozen=True):
    """One task of the agent's plan."""

    content: str
    status: PlanStatus = "pending"
    priority: PlanPriority = "medium"


class ToolCall(Struct, frozen=True):
    """A call as the model wrote it: `arguments` is its JSON text, which need not be valid."""

    id: str
    name: str
    arguments: str


class UserMessage(Struct, frozen=True, tag="user"):
    """What the user said, parts in order. `hidden` ones the agent wrote itself; they are not shown on replay."""

    id: str
    parts: tuple[Part, ...]
    hidden: bool = False


class AssistantMessage(Struct, frozen=True, tag="assistant"):
    """One answer of a model.

    Attributes:
        id: unique in the session, the `messageId` of its chunks.
        text: what it said.
        reasoning: what it thought, as far as the endpoint told.
        calls: the tools it called; a ToolResult for each follows in the history.
        extras: what an endpoint wants back verbatim, by wire API, e.g. signed thinking blocks; others ignore it.
        partial: the turn was cancelled, or the stream broke off, before its end.
    """

    id: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    extras: dict[str, Any] = {}
    partial: bool = False


class ToolResult(Struct, frozen=True, tag="tool_result"):
    """What came of a tool call.

    Attributes:
        call_id: the call of the assistant's message before it.
        content: what the model is told.
        failed: it did not do what it was asked; the content says why.
        images: pictures for the model, after the content.
        card: how it looked when it ended, for replay.
        plan: the whole plan, if this call changed it.
    """

    call_id: str
    content: str
    failed: bool = False
    images: tuple[Image, ...] = ()
    card: Card | None = None
    plan: tuple[PlanEntry, ...] | None = None


class Summary(Struct, frozen=True, tag="summary"):
    """A compaction: from here on the model sees `text` for everything before, but for the last `kept` messages."""

    id: str
    text: str
    kept: int = 0


class Cleared(Struct, frozen=True, tag="cleared"):
    """The user began anew: the model sees nothing of what is before."""

    id: str


Message = UserMessage | AssistantMessage | ToolResult | Summary | Cleared
