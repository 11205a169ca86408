"""The `cortex` command as a process."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

COMMAND = (sys.executable, "-m", "helexa.cortex")


async def run(*arguments: str, cwd: Path | None = None, **variables: str) -> tuple[int | None, str, str]:
    """Its exit code and what it wrote to stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdout=PIPE, stderr=PIPE, cwd=cwd, env={**os.environ, **variables}
    )
    stdout, stderr = await process.communicate()
    return process.returncode, stdout.decode(), stderr.decode()
