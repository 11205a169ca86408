"""Message types of a conversation, as stored in the session's log file.

Later versions must read the log files of older versions. So new fields need a default, and fields are never renamed.
"""

from typing import Any, Literal

from msgspec import Struct

ToolKind = Literal["read", "edit", "delete", "move", "search", "execute", "think", "fetch", "switch_mode", "other"]
PlanStatus = Literal["pending", "in_progress", "completed"]
PlanPriority = Literal["high", "medium", "low"]


class Text(Struct, frozen=True, tag="text"):
    """A text part of a message."""

    text: str


class Image(Struct, frozen=True, tag="image"):
    """An image in a message. `data` is base64, and `mime_type` is for example `image/png`."""

    mime_type: str
    data: str
    uri: str | None = None


Part = Text | Image


class Location(Struct, frozen=True):
    """A file that a tool call reads or changes. `path` is absolute, and `line` counts from 1."""

    path: str
    line: int | None = None


class Diff(Struct, frozen=True, tag="diff"):
    """A change of one file, with the text before and after the change. `old` is None if the file is new."""

    path: str
    old: str | None
    new: str


class Terminal(Struct, frozen=True, tag="terminal"):
    """A terminal of the editor that shows the live output of a command in the display of a tool call.

    The terminal disappears after the command ends. The output remains as text in the `ToolResult`.
    """

    terminal_id: str


CardContent = Text | Image | Diff | Terminal


class Card(Struct, frozen=True):
    """The display of a tool call in an editor.

    Attributes:
        title: one line for the user.
        kind: kind of tool, which determines the icon.
        locations: files that the call reads or changes. Editors may open these files.
        content: content that the editor shows when the user expands the tool call.
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
    """A tool call by the model. `arguments` is JSON text, which may be invalid."""

    id: str
    name: str
    arguments: str


class UserMessage(Struct, frozen=True, tag="user"):
    """A message with the role `user`.

    If `hidden`, the agent wrote the message itself, and the editor does not show it when a session is loaded.
    """

    id: str
    parts: tuple[Part, ...]
    hidden: bool = False


class AssistantMessage(Struct, frozen=True, tag="assistant"):
    """One response of the model.

    Attributes:
        id: message id, unique in the session. The chunks sent to the editor have this id as `messageId`.
        text: text of the response.
        reasoning: reasoning text that the endpoint returned.
        calls: tool calls. For each call, a `ToolResult` follows in the history.
        extras: data that later requests send back to the endpoint unchanged, for example signed thinking blocks. The
            keys are API formats. The client of each API format reads only the data under its key.
        partial: whether the response is incomplete because the user canceled it or the stream broke off.
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
        content: text for the model. If the call failed, the text contains the reason.
        failed: whether the call failed.
        images: images for the model, after the content.
        card: final display of the call in the editor, shown again when the session is loaded.
        plan: the complete new plan if the call changed the agent's plan, else None.
    """

    call_id: str
    content: str
    failed: bool = False
    images: tuple[Image, ...] = ()
    card: Card | None = None
    plan: tuple[PlanEntry, ...] | None = None


class Summary(Struct, frozen=True, tag="summary"):
    """A summary of the conversation.

    In requests to the model, `text` replaces all earlier messages, except the last `kept` messages before the summary.
    """

    id: str
    text: str
    kept: int = 0


class Cleared(Struct, frozen=True, tag="cleared"):
    """A history entry: the user cleared the conversation here, and the model sees no earlier messages."""

    id: str


Message = UserMessage | AssistantMessage | ToolResult | Summary | Cleared
