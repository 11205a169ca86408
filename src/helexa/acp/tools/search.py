"""Tools that find files and lines: glob, grep and list_dir.

A separate process searches (`search_process`). It is killed after a timeout, for example if a regular expression takes
too long.
"""

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from helexa.acp.conversation_and_events import Location, ToolKind
from helexa.acp.host import ToolError
from helexa.acp.tools.excerpt import printable, title
from helexa.acp.tools.search_process import Search, SearchResults
from helexa.acp.tools.tool_and_effects import Arguments, BuiltIn, Progress, ToolContext, ToolOutcome, as_block

_SECONDS = 30.0


async def search(request: Search) -> SearchResults:
    """Run a search in a separate process, and return the results.

    Raises:
        ToolError: a pattern is invalid, or the search failed or timed out.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "helexa.acp.tools.search_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_SECONDS):
            output, _ = await process.communicate(msgspec.json.encode(request))
    except TimeoutError as error:
        raise ToolError(
            f"the search took longer than {_SECONDS:g} s; use a simpler pattern or a smaller folder"
        ) from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    try:
        results = msgspec.json.decode(output, type=SearchResults)
    except msgspec.DecodeError as error:
        raise ToolError("the search process failed; try the search again, or use a command") from error
    if results.error:
        raise ToolError(results.error)
    return results


Unit = Literal["files", "matches"]


def report(results: SearchResults, folder: str, unit: Unit) -> str:
    """Return the results of a search as lines of text for the model.

    Each path begins with `folder`. `unit` names the results in notes.
    """
    lines = [
        str(Path(folder, match.path)) + (f":{match.line}: {match.text}" if match.line is not None else "")
        for match in results.matches
    ]
    if results.has_more:
        lines.append(f"[there are more than these {len(lines)} {unit}]")
    elif not lines:
        lines.append(f"[no {unit}]")
    if results.secrets:
        paths = ", ".join(str(Path(folder, path)) for path in results.secrets)
        lines.append(f"[not searched, because they may contain secrets; name one as `path` to ask the user: {paths}]")
    return "\n".join(lines)


class _GlobArguments(Arguments):
    pattern: Annotated[
        str, Meta(description="File name pattern. Examples: `*.py` (in all folders), `src/**/*.{js,ts}`.", min_length=1)
    ]
    path: Annotated[str, Meta(description="Folder to search, with its subfolders. Default: the working directory.")] = (
        "."
    )


class Glob(BuiltIn):
    """The tool `glob`, which finds files by name."""

    name = "glob"
    description = "Find files by name. Files that git ignores are skipped."
    kind: ToolKind = "search"
    arguments = _GlobArguments

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title with the file name pattern and the folder."""
        return f"Find {title(arguments['pattern'])} in {title(arguments['path'])}"

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Find the files that match the pattern, and return their paths for the model."""
        folder = context.boundary.resolve(arguments["path"])
        if not folder.is_folder():
            raise ToolError(f"{arguments['path']} is not a folder; name a folder in path")
        results = await search(Search(str(folder.real), files=arguments["pattern"], max_results=500))
        content = report(results, context.boundary.brief(folder.path), "files")
        return ToolOutcome(content, shown=as_block(content))


_MAX_LOCATIONS = 20


class _GrepArguments(Arguments):
    pattern: Annotated[
        str,
        Meta(
            description="Regular expression (Python syntax), matched line by line. Example: `def main\\(`.",
            min_length=1,
        ),
    ]
    path: Annotated[str, Meta(description="File or folder to search. Default: the working directory.")] = "."
    glob: (
        Annotated[str, Meta(description="Search only files with this name pattern. Example: `*.py`.", min_length=1)]
        | UnsetType
    ) = UNSET
    ignore_case: bool = False


class Grep(BuiltIn):
    """The tool `grep`, which finds lines that match a regular expression."""

    name = "grep"
    description = "Find lines in text files. Files that git ignores are skipped."
    kind: ToolKind = "search"
    arguments = _GrepArguments

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title with the regular expression and the path to search."""
        return f"Search for {title(arguments['pattern'])} in {title(arguments['path'])}"

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Find matching lines. Return them with file path and line number."""
        target = context.boundary.resolve(arguments["path"])
        if not target.exists():
            raise ToolError(f"{arguments['path']} does not exist; find files with list_dir or glob")
        in_folder = target.is_folder()
        folder = target if in_folder else context.boundary.resolve(str(target.path.parent))
        results = await search(
            Search(
                str(folder.real),
                file=None if in_folder else target.real.name,
                files=arguments.get("glob"),
                text=arguments["pattern"],
                ignore_case=arguments["ignore_case"],
                below=str(folder.below),
                own=tuple(map(str, context.boundary.own)),
            )
        )
        content = report(results, context.boundary.brief(folder.path), "matches")
        locations = (Location(str(folder.path / match.path), match.line) for match in results.matches[:_MAX_LOCATIONS])
        return ToolOutcome(content, shown=as_block(content), locations=tuple(locations))


_MAX_ENTRIES = 1000


class _ListArguments(Arguments):
    path: Annotated[str, Meta(description="Path of the folder. Default: the working directory.")] = "."


class ListDir(BuiltIn):
    """The tool `list_dir`, which lists the entries of a folder."""

    name = "list_dir"
    description = "List a folder. Each line is `d name` (folder), `f name` (file) or `l name` (link)."
    kind: ToolKind = "read"
    arguments = _ListArguments

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
                f"{arguments['path']} cannot be listed: {(error.strerror or str(error)).lower()}; list another folder"
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
