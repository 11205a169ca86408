"""The tool `write_file`: create or overwrite a file."""

from typing import Annotated, Any

from msgspec import Meta

from helexa.acp.failure import ToolError
from helexa.acp.history import CardContent, ToolKind
from helexa.acp.host.host import HostError
from helexa.acp.tools.builtin import Arguments, BuiltIn
from helexa.acp.tools.excerpt import title
from helexa.acp.tools.files.change import change_diff
from helexa.acp.tools.tool import Act, Progress, ToolContext, ToolOutcome, Writes


class _Arguments(Arguments):
    path: Annotated[str, Meta(description="The file; folders above it are made.")]
    content: Annotated[str, Meta(description="All of its new text.")]


class WriteFile(BuiltIn):
    """The tool `write_file`, which creates or overwrites a file."""

    name = "write_file"
    description = "Write a whole text file, new or anew. To change a part of one, use edit_file."
    kind: ToolKind = "edit"
    arguments = _Arguments

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title with the path of the file."""
        return f"Write {title(arguments['path'])}"

    def act(self, arguments: dict[str, Any], context: ToolContext) -> Act:
        """Return the effect of the call for the permission rules: it writes one file (`Writes`)."""
        return Writes(context.boundary.resolve(arguments["path"]))

    async def preview(self, arguments: dict[str, Any], context: ToolContext) -> tuple[CardContent, ...]:
        """Return a diff of the file before and after the call, for the permission request."""
        target = context.boundary.resolve(arguments["path"])
        if target.is_folder():
            raise ToolError(f"{arguments['path']} is a folder")
        return (change_diff(target.path, await self._old(arguments, context), arguments["content"]),)

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Write the file, and return a message for the model and a diff for the user."""
        diff = await self.preview(arguments, context)
        target = context.boundary.resolve(arguments["path"])
        await context.host.write_text(target.path, arguments["content"])
        size = len(arguments["content"].encode())
        return ToolOutcome(f"wrote {arguments['path']} ({size} bytes)", shown=diff)

    async def _old(self, arguments: dict[str, Any], context: ToolContext) -> str | None:
        """Return the current text of the file, or None if the file does not exist or is not text."""
        target = context.boundary.resolve(arguments["path"])
        if not target.exists():
            return None
        try:
            return await context.host.read_text(target.path)
        except HostError:
            return None
