"""A server process that `helexa up` starts, and its log file."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from helexa.cli.failure import CONFIG
from helexa.cli.local import parent_death
from helexa.cli.terminal import printable

_TAIL_BYTES = 16 * 1024


class Child:
    """A server process of `helexa up`, which runs a Python module.

    The process runs in a separate session of the operating system, so Ctrl-C on the terminal does not interrupt it.

    Attributes:
        name: name for display.
        log: path of the file with the process's stdout and stderr.
    """

    def __init__(self, module: str, arguments: list[str], log: Path, environ: dict[str, str]) -> None:
        """Start `python -m module arguments`. On Linux, the process receives SIGTERM if this process dies."""
        self.name = module.rpartition(".")[2]
        self.log = log
        self._shown = 0
        program = [sys.executable, "-P", "-m", module, *arguments]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), *program],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )

    def alive(self) -> bool:
        """Return whether the process is running."""
        return self._process.poll() is None

    def terminate(self) -> None:
        """Send SIGTERM to the process if it is running."""
        if self.alive():
            self._process.terminate()

    def kill(self) -> None:
        """Kill the process and its child processes with SIGKILL, and wait until the process has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ending(self) -> str:
        """Return a sentence that says how the process ended, for example with which exit code."""
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} {how}"

    def exit_code(self) -> int:
        """Return the exit code of a command that fails because this process has ended."""
        return CONFIG if self._process.returncode == CONFIG else 1

    def tail(self, lines: int) -> list[str]:
        """Return the last `lines` non-empty lines of the log file, without control characters."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return [printable(line) for line in text.splitlines() if line.strip()][-lines:]

    def news(self) -> list[str]:
        """Return the lines that were added to the log file since the last call of `news`.

        Incomplete lines are returned by a later call. Control characters are removed.
        """
        with self.log.open("rb") as file:
            file.seek(self._shown)
            data = file.read(_TAIL_BYTES)
        end = data.rfind(b"\n") + 1 or (len(data) if len(data) == _TAIL_BYTES else 0)
        self._shown += end
        return [printable(line) for line in data[:end].decode(errors="replace").splitlines()]
