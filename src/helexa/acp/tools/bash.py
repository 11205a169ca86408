"""The tool `bash`, which runs a shell command."""

from typing import Annotated, Any

from msgspec import Meta

from helexa.acp.conversation_and_events import CardContent, Location, Terminal, Text, ToolKind
from helexa.acp.host import ToolError
from helexa.acp.tools.excerpt import ends, fenced, shown_whole, title
from helexa.acp.tools.tool_and_effects import (
    Act,
    Arguments,
    BuiltIn,
    Progress,
    Runs,
    ToolContext,
    ToolOutcome,
    as_block,
)
from helexa.acp.tools.vetted_commands import vetted_command, vetted_environment

_MAX_SECONDS = 600
_MAX_BYTES = 32_000  # maximum bytes of output for the model
_KEPT_BYTES = 1 << 20


class _Arguments(Arguments):
    command: Annotated[str, Meta(description="Shell command line. Example: `pytest -q tests`.", min_length=1)]
    cwd: Annotated[str, Meta(description="Folder in which to run it. Default: the working directory.")] = "."
    timeout: Annotated[int, Meta(ge=1, le=_MAX_SECONDS, description="Seconds after which it is killed.")] = 120


class Bash(BuiltIn):
    """The tool `bash`, which runs a shell command."""

    name = "bash"
    description = (
        "Run a shell command and get its exit code and output. The command cannot ask questions: it has no input. "
        "Processes that it leaves in the background are killed."
    )
    kind: ToolKind = "execute"
    arguments = _Arguments

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title: the start of the command, and the folder if not the default."""
        cwd = arguments["cwd"]
        suffix = "" if cwd in (".", "", str(context.cwd)) else f" in {title(cwd)}"
        return f"Run{suffix}: {title(arguments['command'])}"

    def locations(self, arguments: dict[str, Any], context: ToolContext) -> tuple[Location, ...]:
        """Return an empty tuple, because the files that a command will change are unknown."""
        return ()

    async def preview(self, arguments: dict[str, Any], context: ToolContext) -> tuple[CardContent, ...]:
        """Return the whole command for the permission request; the title may be cut off."""
        cwd = arguments["cwd"]
        folder = "" if cwd in (".", "", str(context.cwd)) else f"in {shown_whole(cwd)}:\n"
        return (Text(fenced(folder + shown_whole(arguments["command"]))),)

    def act(self, arguments: dict[str, Any], context: ToolContext) -> Act:
        """Return the effect of the call, which tells whether the command line is vetted.

        A vetted command line is known to only read files.
        """
        command, boundary = arguments["command"], context.boundary
        folder = boundary.resolve(arguments["cwd"])
        return Runs(command, folder.path, vetted_command(command, folder.real, boundary))

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Run the command to its end or timeout. Return its exit code and output."""
        folder = context.boundary.resolve(arguments["cwd"])
        if not folder.is_folder():
            raise ToolError(f"{arguments['cwd']} is not a folder; name a folder in cwd")
        vetted = vetted_command(arguments["command"], folder.real, context.boundary)
        shown: tuple[CardContent, ...] = ()

        async def started(terminal_id: str | None) -> None:
            nonlocal shown
            if terminal_id is not None:
                shown = (Terminal(terminal_id),)
                await progress(shown)

        result = await context.host.run(
            arguments["command"],
            cwd=folder.path,
            timeout_s=arguments["timeout"],
            output_limit=_KEPT_BYTES,
            started=started,
            environment={} if vetted is None else vetted_environment(vetted, context.boundary),
        )
        if result.timed_out:
            status = f"killed after {arguments['timeout']} s"
        elif result.exit_code is not None:
            status = f"exit {result.exit_code}"
        else:
            status = f"ended by {result.signal or 'a signal'}"
        truncation_note = "\n[earlier output is lost]" if result.truncated else ""
        content = f"{status}{truncation_note}\n{ends(result.output, _MAX_BYTES)}".rstrip()
        return ToolOutcome(content, shown=shown or as_block(content))
