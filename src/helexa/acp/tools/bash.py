"""The tool `bash`: run a shell command, in a terminal of the editor if the editor supports terminals."""

from typing import Annotated, Any

from msgspec import Meta

from helexa.acp.failure import ToolError
from helexa.acp.history import CardContent, Location, Terminal, ToolKind
from helexa.acp.tools.builtin import Arguments, BuiltIn, as_block
from helexa.acp.tools.excerpt import ends, title
from helexa.acp.tools.git_repository import HARDENED
from helexa.acp.tools.tool import Act, Progress, Runs, ToolContext, ToolOutcome
from helexa.acp.tools.vetted_commands import vetted_command

_MAX_SECONDS = 600
_MAX_BYTES = 32_000  # maximum bytes of output for the model
_KEPT_BYTES = 1 << 20


class _Arguments(Arguments):
    command: Annotated[str, Meta(description="The command line.", min_length=1)]
    cwd: Annotated[str, Meta(description="Where to run it; the working directory if not given.")] = "."
    timeout: Annotated[int, Meta(ge=1, le=_MAX_SECONDS, description="Seconds it may take.")] = 120


class Bash(BuiltIn):
    """The tool `bash`, which runs a shell command."""

    name = "bash"
    description = (
        "Run a shell command and get its exit code and output. Nobody can answer its questions. What it leaves in the "
        "background ends with it."
    )
    kind: ToolKind = "execute"
    arguments = _Arguments

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title with the beginning of the command, and the folder if it is not the session's folder."""
        cwd = arguments["cwd"]
        suffix = "" if cwd in (".", "", str(context.cwd)) else f" in {title(cwd)}"
        return f"Run{suffix}: {title(arguments['command'])}"

    def locations(self, arguments: dict[str, Any], context: ToolContext) -> tuple[Location, ...]:
        """Return an empty tuple, because the files that a command will change are unknown."""
        return ()

    async def preview(self, arguments: dict[str, Any], context: ToolContext) -> tuple[CardContent, ...]:
        """Return the full command for the permission request, because the title may be truncated."""
        return as_block(arguments["command"])

    def act(self, arguments: dict[str, Any], context: ToolContext) -> Act:
        """Return the effect of the call for the permission rules: it runs a command line (`Runs`).

        If the command line is known to only read files, `Runs.vetted` is the name of its command, such as `git diff`.
        """
        command, boundary = arguments["command"], context.boundary
        folder = boundary.resolve(arguments["cwd"])
        return Runs(command, folder.path, vetted_command(command, folder.real, boundary))

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Run the command until it exits or times out, and return its exit code and output."""
        folder = context.boundary.resolve(arguments["cwd"])
        if not folder.is_folder():
            raise ToolError(f"{arguments['cwd']} is not a folder")
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
            environment=HARDENED if vetted is not None and vetted.startswith("git ") else {},
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
