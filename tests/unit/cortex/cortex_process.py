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
    """Run the command; return its exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdout=PIPE, stderr=PIPE, cwd=cwd, env={**os.environ, **variables}
    )
    stdout, stderr = await process.communicate()
    return process.returncode, stdout.decode(), stderr.decode()


@asynccontextmanager
async def serving(
    config: Path, *options: str, open_files: int | None = None, **variables: str
) -> AsyncIterator[tuple[Process, str, str]]:
    """Run a gateway process; yield the process, the API's URL and the metrics URL.

    `open_files` is the process's limit on open files.
    """

    def limit() -> None:
        if open_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))

    process = await asyncio.create_subprocess_exec(
        *COMMAND, "serve", "-c", str(config), *options, stderr=PIPE, env={**os.environ, **variables}, preexec_fn=limit
    )
    assert process.stderr is not None
    try:
        async for line in process.stderr:
            if match := re.search(r"listening url=(http://\S+) metrics_url=(http://\S+)", line.decode()):
                break
        else:
            raise AssertionError("the gateway never listened")
        yield process, match[1], match[2]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
