"""The interface of tools, and the base classes of built-in tools.

A built-in tool declares its arguments as a msgspec type.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct

from helexa.acp.config import Settings, config_path
from helexa.acp.conversation_and_events import CardContent, Image, Location, PlanEntry, Text, ToolKind
from helexa.acp.host import Host, ToolError
from helexa.acp.tools.boundary_and_secrets import Boundary, OutOfBounds, ResolvedPath
from helexa.acp.tools.excerpt import ends, fenced

Verdict = Literal["allow_once", "allow_always", "reject_once", "cancelled"]


@dataclass(frozen=True, slots=True)
class Reads:
    """Effect of a tool call that only reads, and only in the session's folders."""

    # The file that the call reads if it usually contains secrets, such as `.env`. Otherwise None.
    secret: ResolvedPath | None = None


@dataclass(frozen=True, slots=True)
class Writes:
    """Effect of a tool call that creates or changes the file `target`."""

    target: ResolvedPath


@dataclass(frozen=True, slots=True)
class Runs:
    """Effect of a tool call that runs a command line in a shell."""

    command: str  # the command line
    folder: Path  # working directory of the shell
    # Name of the command, for example `git diff`, if the command line is known to only read files. Otherwise None; see
    # `helexa.acp.tools.vetted_commands`.
    vetted: str | None = None


@dataclass(frozen=True, slots=True)
class Fetches:
    """Effect of a tool call that sends an HTTP request to the server `host`."""

    host: str


@dataclass(frozen=True, slots=True)
class Calls:
    """Effect of a tool call that an MCP server runs."""

    tool: str
    only_reads: bool  # whether the server declares the tool as read-only


# The effect of a tool call. It determines whether the permission rules let the call run.
Act = Reads | Writes | Runs | Fetches | Calls


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """The result of a tool call."""

    content: str  # text for the model
    failed: bool = False  # whether the call failed. A command that ran and exited with 1 has not failed.
    # Content that the editor shows for the call. If empty, the editor shows `content`.
    shown: tuple[CardContent, ...] = ()
    # files that the call read or changed, if `Tool.locations` could not name them before the call
    locations: tuple[Location, ...] = ()
    images: tuple[Image, ...] = ()  # images for the model
    plan: tuple[PlanEntry, ...] | None = None  # the complete new plan if the call changed the agent's plan, else None


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The environment in which the tools of a session run; each tool call gets it."""

    session_id: str
    cwd: Path  # working directory of the session, an absolute path as the editor wrote it
    roots: tuple[Path, ...]  # absolute paths of the folders that the tools may access: `cwd` and the additional folders
    plan_dir: Path  # folder for the agent's plans. In plan mode, the tools may write only to this folder.
    host: Host  # access to files and commands
    settings: Settings  # the configuration

    @property
    def boundary(self) -> Boundary:
        """The folders that the tools may access, with methods to check paths."""
        own = (self.settings.data_dir, config_path(), self.settings.system_prompt_path)
        return Boundary(self.cwd, self.roots, self.plan_dir, filter(None, own))


# Callback that replaces the content that the editor shows for a call.
Progress = Callable[[tuple[CardContent, ...]], Awaitable[None]]


class Tool(Protocol):
    """A tool that the model can call.

    Callers pass the model's arguments to `check`, and the arguments that `check` returns to the other methods.
    """

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

        A built-in tool converts numbers that were written as text, and uses the default of an argument that is missing
        or null. An MCP tool returns the arguments unchanged.

        Raises:
            ToolError: the arguments do not match the schema.
        """
        ...

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return one line of text that describes a call with these arguments to the user."""
        ...

    def locations(self, arguments: dict[str, Any], context: ToolContext) -> tuple[Location, ...]:
        """Return the files that a call will read or change, as far as they are known."""
        ...

    async def preview(self, arguments: dict[str, Any], context: ToolContext) -> tuple[CardContent, ...]:
        """Return what the editor shows in a permission request, such as a diff.

        Raises:
            ToolError: the call would fail, for example because the text to replace is not in the file.
        """
        ...

    def act(self, arguments: dict[str, Any], context: ToolContext) -> Act:
        """Return the effect of a call, for example `Reads`, `Writes` or `Runs`.

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


_SHOWN_BYTES = 8_000


class Arguments(Struct, forbid_unknown_fields=True):
    """Base class of the types that declare a tool's arguments."""


class BuiltIn:
    """Base class of built-in tools, which implements most methods of `Tool`.

    Subclasses set the name, the description and the type of the arguments. Subclasses that write files, run commands or
    send requests override `act`.
    """

    name: str
    description: str
    kind: ToolKind
    arguments: type[Arguments]

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments, derived from the argument type."""
        (_,), components = msgspec.json.schema_components([self.arguments], ref_template="{name}")
        return _inlined(components[self.arguments.__name__], components)

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Validate the arguments and return them with the types of the schema."""
        present = {name: value for name, value in arguments.items() if value is not None}
        try:
            return msgspec.to_builtins(msgspec.convert(present, self.arguments, strict=False))
        except (msgspec.ValidationError, ValueError) as error:
            known = ", ".join(self.arguments.__struct_fields__)
            raise ToolError(f"the arguments of {self.name} are invalid: {error}; its arguments are: {known}") from error

    def locations(self, arguments: dict[str, Any], context: ToolContext) -> tuple[Location, ...]:
        """Return the file in the argument `path`, if the tool has this argument."""
        if "path" not in arguments:
            return ()
        try:
            path = context.boundary.resolve(arguments["path"]).path
        except OutOfBounds:
            return ()
        return (Location(str(path), arguments.get("line")),)

    async def preview(self, arguments: dict[str, Any], context: ToolContext) -> tuple[CardContent, ...]:
        """Return an empty tuple: no preview by default."""
        return ()

    def act(self, arguments: dict[str, Any], context: ToolContext) -> Act:
        """Return the effect of the call for the permission rules: it only reads (`Reads`).

        Raises:
            OutOfBounds: the argument `path` is outside the session's folders.
        """
        if "path" not in arguments:
            return Reads()
        target = context.boundary.resolve(arguments["path"])
        return Reads(target if target.secret and not target.is_folder() else None)


def as_block(content: str) -> tuple[CardContent, ...]:
    """Return a tool's text as a Markdown code block, shortened if it is long."""
    return (Text(fenced(ends(content, _SHOWN_BYTES))),)


def _inlined(schema: Any, components: dict[str, Any]) -> Any:
    """Return a JSON Schema without titles and without references."""
    match schema:
        case {"$ref": name}:
            return _inlined(components[name], components)
        case dict():
            # Small models and grammar compilers handle schemas without titles and references better.
            return {key: _inlined(value, components) for key, value in schema.items() if key != "title"}
        case list():
            return [_inlined(value, components) for value in schema]
    return schema
