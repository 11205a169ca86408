"""The protocol of tools: properties, arguments, permission and results."""

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
    """The calls that an "always" answer covers, e.g. tool `bash` with subject `git status *`.

    Attributes:
        tool: name of the tool.
        subject: the covered calls of the tool, for example a folder for `edit_file`. An empty subject covers all calls.
        label: text for the user, for example "edits in src/".
        persistent: whether a permission also holds in later sessions of the project.
    """

    tool: str
    subject: str
    label: str
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class Reads:
    """A call that only reads permitted files, or changes only the session."""


@dataclass(frozen=True, slots=True)
class Writes:
    """A call that creates or changes a file."""

    target: ResolvedPath


@dataclass(frozen=True, slots=True)
class Runs:
    """A call that runs a command line in a shell.

    Attributes:
        command: the command line.
        folder: working directory of the shell.
        vetted: the command, for example `git diff`, if the line is known to only read, else None; see
            `helexa.acp.tools.vetted_commands`.
    """

    command: str
    folder: Path
    vetted: str | None = None


@dataclass(frozen=True, slots=True)
class Fetches:
    """A call that sends a request to a host."""

    host: str


@dataclass(frozen=True, slots=True)
class Calls:
    """A call of an MCP server's tool. `only_reads` is true if the server declares the tool as read-only."""

    tool: str
    only_reads: bool


Act = Reads | Writes | Runs | Fetches | Calls
"""The effect of a call. The permission rules decide by the effect."""


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """The result of a tool call.

    Attributes:
        content: text for the model.
        failed: whether the call failed. A command that exits with 1 has not failed.
        shown: content of the card, the call's display in the editor; if empty, the card shows `content`.
        locations: files that the call touched and that `Tool.locations` could not know before the call.
        images: images for the model.
        plan: the whole plan if the call changed it, else None.
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
        session_id: the client's id of the session.
        cwd: absolute folder of the session, in the spelling that the client uses for its files.
        roots: absolute folders that the tools may access: `cwd` and the additional folders, spelled like `cwd`.
        plan_dir: folder of plans; the only folder that plan mode may write to.
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
        """The files and folders that the tools may access."""
        return Boundary(self.cwd, self.roots, self.plan_dir)


Progress = Callable[[tuple[CardContent, ...]], Awaitable[None]]
"""Callback that shows the current output of a running tool, which replaces the output shown before."""


class Tool(Protocol):
    """One tool. Callers pass arguments through `check` before any other method."""

    @property
    def name(self) -> str:
        """The name that the model calls."""
        ...

    @property
    def description(self) -> str:
        """The description for the model."""
        ...

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments."""
        ...

    @property
    def kind(self) -> ToolKind:
        """The kind of tool, which decides the icon."""
        ...

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the validated arguments. Numbers written as text become numbers; null arguments are removed.

        Raises:
            ToolError: the arguments do not match the schema.
        """
        ...

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return one line that describes the call for the user."""
        ...

    def locations(self, arguments: dict[str, Any], context: ToolContext) -> tuple[Location, ...]:
        """Return the files that the call will touch."""
        ...

    async def preview(self, arguments: dict[str, Any], context: ToolContext) -> tuple[CardContent, ...]:
        """Return what the editor shows during a permission request, for example the diff of an edit.

        Raises:
            ToolError: the call would fail.
        """
        ...

    def act(self, arguments: dict[str, Any], context: ToolContext) -> Act:
        """Return the effect of the call, from which the permission rules decide whether the call may run.

        Raises:
            ToolError: the call is never allowed, for example because a path leaves the session's folders.
        """
        ...

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Run the call.

        Raises:
            ToolError: the call failed. Any other exception is a bug of the tool and also fails the call.
        """
        ...


@dataclass(frozen=True, slots=True)
class Allowed:
    """A ruling: the call may run without asking the user."""


@dataclass(frozen=True, slots=True)
class Denied:
    """A ruling: the call must not run. `reason` is the error message for the model."""

    reason: str


@dataclass(frozen=True, slots=True)
class AskUser:
    """A ruling: the user must decide whether the call runs. An "always" answer would cover `scope`."""

    scope: Scope


Ruling = Allowed | Denied | AskUser


class Grants(Protocol):
    """The scopes that the user has permanently allowed or rejected in this project."""

    def ruling(self, scope: Scope) -> bool | None:
        """Return True for an allowed scope, False for a rejected scope, and None for an undecided scope."""
        ...


@dataclass(frozen=True, slots=True)
class PermissionRequest:
    """A request to the user to allow a tool call. An "always" answer covers `scope`."""

    call_id: str
    name: str
    card: Card
    arguments: dict[str, Any]
    scope: Scope


PermissionCallback = Callable[[PermissionRequest], Awaitable[Verdict]]
"""Callback that asks the user and returns the verdict. The callback has a time limit and raises only CancelledError. If
the client fails, the callback returns a rejection.
"""
