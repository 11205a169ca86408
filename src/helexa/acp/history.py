"""Message types of a conversation, as stored in the session log.

Later versions must read the logs of older versions. So new fields need a default, and fields are never renamed.
"""

from typing import Any, Literal

from msgspec import Struct

ToolKind = Literal["read", "edit", "delete", "move", "search", "execute", "think", "fetch", "switch_mode", "other"]
PlanStatus = Literal["pending", "in_progress", "completed"]
PlanPriority = Literal["high", "medium", "low"]


class Text(Struct, frozen=True, tag="text"):
    """Text of a message."""

    text: str


class Image(Struct, frozen=True, tag="image"):
    """An image in a message; `data` is base64, `mime_type` for example `image/png`."""

    mime_type: str
    data: str
    uri: str | None = None


Part = Text | Image


class Location(Struct, frozen=True):
    """A file location of a tool call; the path is absolute, the line counts from 1."""

    path: str
    line: int | None = None


class Diff(Struct, frozen=True, tag="diff"):
    """A change of one file; `old` is None if the file is new."""

    path: str
    old: str | None
    new: str


class Terminal(Struct, frozen=True, tag="terminal"):
    """A live terminal of the client, shown in a card.

    The terminal disappears after its process ends. The output remains as text in the `ToolResult`.
    """

    terminal_id: str


CardContent = Text | Image | Diff | Terminal


class Card(Struct, frozen=True):
    """The display of a tool call in an editor.

    Attributes:
        title: one line for the user.
        kind: kind of tool, which decides the icon.
        locations: files that the call touches; editors may open them.
        content: content that the editor shows when the user opens the card.
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
    """A tool call by the model; `arguments` is its JSON text, which may be invalid."""

    id: str
    name: str
    arguments: str


class UserMessage(Struct, frozen=True, tag="user"):
    """A message of the user. If `hidden`, the agent itself wrote the message, and a replay does not show it."""

    id: str
    parts: tuple[Part, ...]
    hidden: bool = False


class AssistantMessage(Struct, frozen=True, tag="assistant"):
    """One answer of a model.

    Attributes:
        id: unique in the session; the `messageId` of the answer's chunks.
        text: text of the answer.
        reasoning: reasoning text that the endpoint returned.
        calls: tool calls. For each call, a `ToolResult` follows in the history.
        extras: data to send back to the endpoint verbatim, for example signed thinking blocks. The keys are wire APIs,
            and each wire API reads only its own data.
        partial: whether the turn was canceled or the stream broke off before the end.
    """

    id: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    extras: dict[str, Any] = {}
    partial: bool = False


class ToolResult(Struct, frozen=True, tag="tool_result"):
    """The result of a tool call.

    Attributes:
        call_id: id of the call in the preceding assistant message.
        content: text for the model.
        failed: whether the call failed; the content contains the reason.
        images: images for the model, after the content.
        card: final display of the call in the editor, for replay.
        plan: the whole plan if the call changed it, else None.
    """

    call_id: str
    content: str
    failed: bool = False
    images: tuple[Image, ...] = ()
    card: Card | None = None
    plan: tuple[PlanEntry, ...] | None = None


class Summary(Struct, frozen=True, tag="summary"):
    """A compaction: `text` replaces all earlier messages except the last `kept` of them."""

    id: str
    text: str
    kept: int = 0


class Cleared(Struct, frozen=True, tag="cleared"):
    """The user cleared the conversation: the model sees no earlier messages."""

    id: str


Message = UserMessage | AssistantMessage | ToolResult | Summary | Cleared
