"""Searches files in a folder and its subfolders, in a separate process.

The process can be killed after a timeout, for example if a regular expression takes too long.
"""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from helexa.acp.failure import ToolError

_SECONDS = 30.0


class Search(Struct, frozen=True):
    """The parameters of a search for files or for lines of files.

    Attributes:
        folder: the folder to search. Symbolic links are not followed, and files that git ignores are skipped.
        file: name of the only file in `folder` to search, or None.
        files: pattern of the files to search, or None for all files. The syntax is that of .gitignore, with braces such
            as `*.{js,ts}` in addition.
        text: regular expression to find in lines. If None, the search returns files, not lines.
        ignore_case: whether `text` ignores case.
        max_results: maximum number of results.
    """

    folder: str
    file: str | None = None
    files: str | None = None
    text: str | None = None
    ignore_case: bool = False
    max_results: int = 200


class Match(Struct, frozen=True):
    """A matching file, or a matching line of a file.

    Attributes:
        path: path of the file, relative to the searched folder.
        line: line number, counted from 1, or None if files were searched.
        text: the line, shortened if it is long.
    """

    path: str
    line: int | None = None
    text: str = ""


class SearchResults(Struct, frozen=True):
    """The results of a search, sorted by path.

    Attributes:
        matches: the matching files or lines, at most `Search.max_results`.
        has_more: whether there are more matches, which were omitted.
        error: error message if a pattern is invalid, else None.
    """

    matches: tuple[Match, ...] = ()
    has_more: bool = False
    error: str | None = None


async def search(request: Search) -> SearchResults:
    """Run a search in a separate process, and return the results.

    Raises:
        ToolError: a pattern is invalid, or the search timed out.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "helexa.acp.tools.search.search_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_SECONDS):
            output, _ = await process.communicate(msgspec.json.encode(request))
    except TimeoutError as error:
        raise ToolError(f"The search took longer than {_SECONDS:g} s; narrow the pattern or the folder") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    try:
        results = msgspec.json.decode(output, type=SearchResults)
    except msgspec.DecodeError as error:
        raise ToolError("The search failed") from error
    if results.error:
        raise ToolError(results.error)
    return results


Unit = Literal["files", "matches"]


def report(results: SearchResults, folder: str, unit: Unit) -> str:
    """Return the results as lines of text for the model. Each path begins with `folder`."""
    lines = [
        str(Path(folder, match.path)) + (f":{match.line}: {match.text}" if match.line is not None else "")
        for match in results.matches
    ]
    if results.has_more:
        lines.append(f"[there are more than these {len(lines)} {unit}]")
    return "\n".join(lines) or f"[no {unit}]"
