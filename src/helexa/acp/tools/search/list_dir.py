"""The tool `list_dir`: list the entries of a folder."""

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from helexa.acp.failure import ToolError
from helexa.acp.history import ToolKind
from helexa.acp.tools.builtin import Arguments, BuiltIn, as_block
from helexa.acp.tools.excerpt import printable, title
from helexa.acp.tools.tool import Progress, ToolContext, ToolOutcome

_MAX_ENTRIES = 1000


class _Arguments(Arguments):
    path: Annotated[str, Meta(description="The folder; the working directory if not given.")] = "."


class ListDir(BuiltIn):
    """The tool `list_dir`, which lists the entries of a folder."""

    name = "list_dir"
    description = "List a folder: one line for each entry, with d for a folder, f for a file, l for a link."
    kind: ToolKind = "read"
    arguments = _Arguments

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title with the path of the folder."""
        return f"List {title(arguments['path'])}"

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """List the entries of the folder, and return the list for the model."""
        folder = context.boundary.resolve(arguments["path"])
        try:
            lines = await asyncio.to_thread(_entries, folder.real)
        except OSError as error:
            raise ToolError(
                f"{arguments['path']} cannot be listed: {(error.strerror or str(error)).lower()}"
            ) from error
        left_out = len(lines) - _MAX_ENTRIES
        if left_out > 0:
            lines = [*lines[:_MAX_ENTRIES], f"[{left_out} more entries are left out]"]
        content = "\n".join(lines) or "[the folder is empty]"
        return ToolOutcome(content, shown=as_block(content))


def _entries(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted((f"{_letter(entry)} {printable(entry.name)}" for entry in entries), key=lambda line: line[2:])


def _letter(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "l"
    if entry.is_dir(follow_symlinks=False):
        return "d"
    return "f" if entry.is_file(follow_symlinks=False) else "?"
