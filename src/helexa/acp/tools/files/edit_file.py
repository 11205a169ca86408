"""The tool `edit_file`: replace a part of a file's text."""

from typing import Annotated, Any

from msgspec import Meta

from helexa.acp.failure import ToolError
from helexa.acp.history import CardContent, Location, ToolKind
from helexa.acp.tools.builtin import Arguments, BuiltIn
from helexa.acp.tools.excerpt import title
from helexa.acp.tools.files.change import change_diff, replaced
from helexa.acp.tools.tool import Act, Progress, ToolContext, ToolOutcome, Writes


class _Arguments(Arguments):
    path: Annotated[str, Meta(description="The file.")]
    old_text: Annotated[str, Meta(description="What is there now, exactly, with enough around it to be there once.")]
    new_text: Annotated[str, Meta(description="What shall be there instead.")]


class EditFile(BuiltIn):
    """The tool `edit_file`, which replaces a part of a file's text."""

    name = "edit_file"
    description = "Replace a piece of a text file. It must be in the file exactly once, white space included."
    kind: ToolKind = "edit"
    arguments = _Arguments

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title with the path of the file."""
        return f"Edit {title(arguments['path'])}"

    def act(self, arguments: dict[str, Any], context: ToolContext) -> Act:
        """Return the effect of the call for the permission rules: it changes one file (`Writes`)."""
        return Writes(context.boundary.resolve(arguments["path"]))

    async def preview(self, arguments: dict[str, Any], context: ToolContext) -> tuple[CardContent, ...]:
        """Return a diff of the file before and after the edit, for the permission request."""
        old, new, _ = await self._change(arguments, context)
        return (change_diff(context.boundary.resolve(arguments["path"]).path, old, new),)

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Replace the text in the file, and return a message for the model and a diff for the user."""
        target = context.boundary.resolve(arguments["path"])
        old, new, line = await self._change(arguments, context)
        await context.host.write_text(target.path, new)
        return ToolOutcome(
            f"edited {arguments['path']} at line {line}",
            shown=(change_diff(target.path, old, new),),
            locations=(Location(str(target.path), line),),
        )

    async def _change(self, arguments: dict[str, Any], context: ToolContext) -> tuple[str, str, int]:
        target = context.boundary.resolve(arguments["path"])
        if target.is_folder():
            raise ToolError(f"{arguments['path']} is a folder")
        old = await context.host.read_text(target.path)
        return old, *replaced(old, arguments["old_text"], arguments["new_text"])
