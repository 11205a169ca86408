"""The interface of tools: properties, arguments, effects for the permission rules, and results."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from helexa.acp.config import Settings
from helexa.acp.failure import ToolError as ToolError
from helexa.acp.history import Card, CardContent, Image, Location, PlanEntry, ToolKind
from helexa.acp.host.boundary import Boundary, ResolvedPath
from helexa.acp.host.host import Host

Verdict = Literal["allow_once", "allow_always", "reject_once", "cancelled"]


@dataclass(frozen=True, slots=True)
class Scope:
    """A set of tool calls that the user can always allow or always reject, such as all `git status` commands.

    Attributes:
        tool: name of the tool, for example `bash`.
        subject: which calls of the tool are in the set, for example `git status *`, or a folder for `edit_file`. An
            empty subject means all calls of the tool.
        label: description for the user, for example "edits in src/".
        persistent: whether the user's decision also applies to later sessions of the project.
    """

    tool: str
    subject: str
    label: str
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class Reads:
    """Effect of a tool call that changes no files, and reads files only in the session's folders."""


@dataclass(frozen=True, slots=True)
class Writes:
    """Effect of a tool call that creates or changes the file `target`."""

    target: ResolvedPath


@dataclass(frozen=True, slots=True)
class Runs:
    """Effect of a tool call that runs a command line in a shell.

    Attributes:
        command: the command line.
        folder: working directory of the shell.
        vetted: name of the command, for example `git diff`, if the command line is known to only read files. Otherwise
            None; see `helexa.acp.tools.vetted_commands`.
    """

    command: str
    folder: Path
    vetted: str | None = None


@dataclass(frozen=True, slots=True)
class Fetches:
    """Effect of a tool call that sends an HTTP request to the server `host`."""

    host: str


@dataclass(frozen=True, slots=True)
class Calls:
    """Effect of a tool call that an MCP server runs.

    Attributes:
        tool: name of the tool.
        only_reads: whether the server declares the tool as read-only.
    """

    tool: str
    only_reads: bool


Act = Reads | Writes | Runs | Fetches | Calls
"""The effect of a tool call, from which the permission rules decide whether the call may run."""


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """The result of a tool call.

    Attributes:
        content: text for the model.
        failed: whether the call failed. A command that ran and exited with 1 has not failed.
        shown: content that the editor shows for the call. If empty, the editor shows `content`.
        locations: files that the call read or changed, if `Tool.locations` could not name them before the call.
        images: images for the model.
        plan: the complete new plan if the call changed the agent's plan, else None.
    """

    content: str
    failed: bool = False
    shown: tuple[CardContent, ...] = ()
    locations: tuple[Location, ...] = ()
    images: tuple[Image, ...] = ()
    plan: tuple[PlanEntry, ...] | None = None


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The environment in which the tools of a session run.

    Attributes:
        session_id: id of the session.
        cwd: working directory of the session, an absolute path as the editor wrote it.
        roots: absolute paths of the folders that the tools may access: `cwd` and the additional folders.
        plan_dir: folder for the agent's plans. In plan mode, the tools may write only to this folder.
        host: access to files and commands.
        settings: the configuration.
    """

    session_id: str
    cwd: Path
    roots: tuple[Path, ...]
    plan_dir: Path
    host: Host
    settings: Settings

    @property
    def boundary(self) -> Boundary:
        """The folders that the tools may access, with methods to check paths."""
        return Boundary(self.cwd, self.roots, self.plan_dir)


Progress = Callable[[tuple[CardContent, ...]], Awaitable[None]]
"""Callback that makes the editor show new content for a running tool call, instead of the previous content."""


class Tool(Protocol):
    """A tool that the model can call. `check` returns checked arguments, which the other methods require."""

    @property
    def name(self) -> str:
        """The name by which the model calls the tool."""
        ...

    @property
    def description(self) -> str:
        """The description of the tool for the model."""
        ...

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the tool's arguments."""
        ...

    @property
    def kind(self) -> ToolKind:
        """The kind of tool, which determines the icon in the editor."""
        ...

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Validate the arguments of a call and return them.

        In the returned arguments, numbers written as text are numbers, and arguments that were null are missing.

        Raises:
            ToolError: the arguments do not match the schema.
        """
        ...

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return one line of text that describes a call with these arguments to the user."""
        ...

    def locations(self, arguments: dict[str, Any], context: ToolContext) -> tuple[Location, ...]:
        """Return the files that a call with these arguments will read or change, as far as they are known."""
        ...

    async def preview(self, arguments: dict[str, Any], context: ToolContext) -> tuple[CardContent, ...]:
        """Return the content that the editor shows in a permission request, for example the diff of an edit.

        Raises:
            ToolError: the call would fail, for example because the text to replace is not in the file.
        """
        ...

    def act(self, arguments: dict[str, Any], context: ToolContext) -> Act:
        """Return the effect of a call with these arguments, for example `Reads`, `Writes` or `Runs`.

        From the effect, the permission rules decide whether the call may run.

        Raises:
            ToolError: the call is never allowed, for example because a path leaves the session's folders.
        """
        ...

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Run the tool with these arguments and return the result.

        Args:
            arguments: arguments that `check` returned.
            context: the session's folders and access to files and commands.
            progress: callback that shows the current output in the editor.

        Raises:
            ToolError: the call failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Allowed:
    """Decision of the permission rules: the tool call may run without asking the user."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Decision of the permission rules: the tool call must not run. `reason` is the error message for the model."""

    reason: str


@dataclass(frozen=True, slots=True)
class AskUser:
    """Decision of the permission rules: the user must be asked whether the tool call may run.

    If the user chooses "always allow", the permission applies to all calls in `scope`.
    """

    scope: Scope


Ruling = Allowed | Denied | AskUser


class Grants(Protocol):
    """The user's earlier decisions to always allow or always reject sets of tool calls (scopes)."""

    def ruling(self, scope: Scope) -> bool | None:
        """Return the user's earlier decision about all calls in `scope`.

        True means always allowed, False means always rejected, and None means that there is no such decision.
        """
        ...


@dataclass(frozen=True, slots=True)
class PermissionRequest:
    """A request to the user to allow a tool call.

    Attributes:
        call_id: id of the tool call.
        name: name of the tool.
        card: display of the call in the editor.
        arguments: arguments of the call.
        scope: set of calls to which the permission applies if the user chooses "always allow".
    """

    call_id: str
    name: str
    card: Card
    arguments: dict[str, Any]
    scope: Scope


PermissionCallback = Callable[[PermissionRequest], Awaitable[Verdict]]
"""Callback that asks the user for permission and returns the decision. The callback has a time limit and raises only
CancelledError. If the editor fails, the callback returns a rejection.
"""
