"""Search below a folder, in a process of its own: a pattern that never ends, or a huge tree, is simply cut off."""

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
    """What to look for.

    Attributes:
        folder: where; links are not followed, and what git ignores is passed over.
        file: only in this file of the folder, by its name.
        files: a pattern of the files to look at, as in .gitignore, with braces.
        text: a regular expression to find in their lines; None only lists the files.
        ignore_case: of the text.
        most: lines of the answer.
    """

    folder: str
    file: str | None = None
    files: str | None = None
    text: str | None = None
    ignore_case: bool = False
    most: int = 200


class Found(Struct, frozen=True):
    """A file below the folder, with a line of it that has the text."""

    path: str
    line: int | None = None
    text: str = ""


class Findings(Struct, frozen=True):
    """What was found, in the order of paths; `more` if that is not all. `error` says what is wrong with a pattern."""

    found: tuple[Found, ...] = ()
    more: bool = False
    error: str | None = None


async def search(question: Search) -> Findings:
    """Look for it.

    Raises:
        ToolError: a pattern is wrong, or it took too long.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "helexa.acp.tools.search.search_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_SECONDS):
            output, _ = await process.communicate(msgspec.json.encode(question))
    except TimeoutError as error:
        raise ToolError(f"The search took longer than {_SECONDS:g} s; narrow the pattern or the folder") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    try:
        findings = msgspec.json.decode(output, type=Findings)
    except msgspec.DecodeError as error:
        raise ToolError("The search failed") from error
    if findings.error:
        raise ToolError(findings.error)
    return findings


Unit = Literal["files", "matches"]


def report(findings: Findings, folder: str, unit: Unit) -> str:
    """The findings as lines for the model, with paths below `folder`."""
    lines = [
        str(Path(folder, found.path)) + (f":{found.line}: {found.text}" if found.line is not None else "")
        for found in findings.found
    ]
    if findings.more:
        lines.append(f"[there are more than these {len(lines)} {unit}]")
    return "\n".join(lines) or f"[no {unit}]"
