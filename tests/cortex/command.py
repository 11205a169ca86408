"""The `cortex` command as a process."""

import asyncio
import os
import re
import resource
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

COMMAND = (sys.executable, "-m", "helexa.cortex")


async def run(*arguments: str, cwd: Path | None = None, **variables: str) -> tuple[int | None, str, str]:
    """Its exit code and what it wrote to stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdout=PIPE, stderr=PIPE, cwd=cwd, env={**os.environ, **variables}
    )
    stdout, stderr = await process.communicate()
    return process.returncode, stdout.decode(), stderr.decode()


@asynccontextmanager
async def serving(
    config: Path, *options: str, open_files: int | None = None, **variables: str
) -> AsyncIterator[tuple[Process, str, str]]:
    """A gateway process with its API's and its metrics' URL; `open_files` is its limit on open files."""

    def limit() -> None:
        if open_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))

    process = await asyncio.create_subprocess_exec(
        *COMMAND, "serve", "-c", str(config), *options, stderr=PIPE, env={**os.environ, **variables}, preexec_fn=limit
    )
    assert process.stderr is not None
    try:
        async for line in process.stderr:
            if found := re.search(r"listening on (http://\S+), metrics on (http://\S+)", line.decode()):
                break
        else:
            raise AssertionError("it never listened")
        yield process, found[1], found[2]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
