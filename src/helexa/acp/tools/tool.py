"""The port of tools: what each of them tells of itself, and what running one needs and gives."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from helexa.acp.config import Settings
from helexa.acp.failure import ToolError as ToolError
from helexa.acp.history import Card, CardContent, Image, Location, PlanEntry, ToolKind
from helexa.acp.host.boundary import Boundary, Place
from helexa.acp.host.host import Host

Verdict = Literal["allow_once", "allow_always", "reject_once", "cancelled"]


@dataclass(frozen=True, slots=True)
class Scope:
    """What "always" covers, e.g. tool `bash` with subject `git status *`, or `edit_file` with a folder.

    Attributes:
        tool: its name.
        subject: what of it; empty is all of it.
        label: for the user, such as "edits in src/".
        persistent: whether an allowance holds in later sessions of the project, too.
    """

    tool: str
    subject: str
    label: str
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class Reads:
    """A call only looks at what the model may see, or changes nothing outside of the session."""


@dataclass(frozen=True, slots=True)
class Writes:
    """A call makes or changes a file."""

    place: Place


@dataclass(frozen=True, slots=True)
class Runs:
    """A call has a shell run a command line.

    Attributes:
        folder: where the shell runs.
        vetted: the vetted command that the line is, such as `git diff`; see `helexa.acp.tools.vetted_commands`.
    """

    command: str
    folder: Path
    vetted: str | None = None


@dataclass(frozen=True, slots=True)
class Fetches:
    """A call asks a host for something."""

    host: str


@dataclass(frozen=True, slots=True)
class Calls:
    """A call goes to a server of the client's; whether it `only_reads` is what the server says."""

    tool: str
    only_reads: bool


Act = Reads | Writes | Runs | Fetches | Calls
"""What a call would do, as far as permission goes."""


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What a tool did.

    Attributes:
        content: what the model is told.
        failed: whether it went wrong all the same, e.g. a command that exits with 1 has not.
        shown: what the card shows; empty shows the content.
        locations: what it touched, where that was not known before.
        images: pictures for the model.
        plan: the whole plan, if it changed it.
    """

    content: str
    failed: bool = False
    shown: tuple[CardContent, ...] = ()
    locations: tuple[Location, ...] = ()
    images: tuple[Image, ...] = ()
    plan: tuple[PlanEntry, ...] | None = None


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What tools of a session work with.

    Attributes:
        session_id: the client's id of the session.
        cwd: the folder of the session, absolute, as the client spells it: it knows its files by no other name.
        roots: the folders that tools stay in: `cwd` and the additional ones, likewise.
        plan_dir: where plans are written; the only place that plan mode may write to.
        host: files and commands.
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
        """How far the tools may go."""
        return Boundary(self.cwd, self.roots, self.plan_dir)


Progress = Callable[[tuple[CardContent, ...]], Awaitable[None]]
"""Shows what a running tool has so far, replacing what it showed before."""


class Tool(Protocol):
    """One tool. Arguments go through `check` before any other method sees them."""

    @property
    def name(self) -> str:
        """What the model calls it."""
        ...

    @property
    def description(self) -> str:
        """What it does, for the model."""
        ...

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of its arguments."""
        ...

    @property
    def kind(self) -> ToolKind:
        """What it does, for the icon."""
        ...

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments as the schema has them: a number written as text is one, what is null is not given.

        Raises:
            ToolError: they do not fit it.
        """
        ...

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """One line for a person."""
        ...

    def locations(self, arguments: dict[str, Any], context: ToolContext) -> tuple[Location, ...]:
        """The files it will touch."""
        ...

    async def preview(self, arguments: dict[str, Any], context: ToolContext) -> tuple[CardContent, ...]:
        """What the card shows while the user is asked: an edit shows its diff.

        Raises:
            ToolError: it can be told already that it will fail.
        """
        ...

    def act(self, arguments: dict[str, Any], context: ToolContext) -> Act:
        """What it would do.

        Raises:
            ToolError: that is out of the question, such as a path that leads out of the session's folders.
        """
        ...

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Do it.

        Raises:
            ToolError: it could not; any other exception is a fault of the tool, and fails the call as well.
        """
        ...


@dataclass(frozen=True, slots=True)
class Allowed:
    """The call may run without a question."""


@dataclass(frozen=True, slots=True)
class Denied:
    """The call may not run; the reason is for the model."""

    reason: str


@dataclass(frozen=True, slots=True)
class Asked:
    """The user decides."""

    scope: Scope


Ruling = Allowed | Denied | Asked


class Grants(Protocol):
    """The scopes that the user has allowed or rejected for good in this project."""

    def ruling(self, scope: Scope) -> bool | None:
        """Whether the scope was allowed (True) or rejected (False) for good; None where it was not."""
        ...


@dataclass(frozen=True, slots=True)
class PermissionQuestion:
    """A tool call that the user is asked about; `scope` is what the "always" answers cover."""

    call_id: str
    name: str
    card: Card
    arguments: dict[str, Any]
    scope: Scope


Ask = Callable[[PermissionQuestion], Awaitable[Verdict]]
"""Asks the user, never hangs, never raises but CancelledError: a client that fails to answer has said `cancelled`."""
