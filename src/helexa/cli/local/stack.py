"""Starts, watches and stops the server processes of `helexa up`."""

import time
from pathlib import Path
from typing import Self

from helexa.cli.failure import CommandError
from helexa.cli.local.server_process import Child
from helexa.cli.stop_signals import StopSignals
from helexa.cli.terminal import note

_STOP_SECONDS = 25.0
_WATCH_SECONDS = 0.2
_TAIL_LINES = 8


class Stack:
    """The server processes of one `helexa up`. The end of the `with` block stops them in the order of their start."""

    def __init__(self, environ: dict[str, str], verbose: bool) -> None:
        """Create a stack without servers; `start` adds servers.

        Args:
            environ: environment variables of the servers.
            verbose: whether to copy the lines of the servers' log files to stderr.
        """
        self._environ = environ
        self._verbose = verbose
        self._signals = StopSignals()
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for child in self._children:
                self._end(child)
        finally:
            self._show_logs()
            self._signals.__exit__()

    def start(self, module: str, arguments: list[str], log: Path) -> None:
        """Start a server as `python -m module arguments`, with its output in the file `log`."""
        self._children.append(Child(module, arguments, log, self._environ))

    def watch(self, seconds: float | None = None) -> bool:
        """Wait until a signal arrives, at most `seconds`. None means no time limit.

        Return False if a stop signal such as Ctrl-C arrived, else True.

        Raises:
            CommandError: a server process has ended. The last lines of its log file were printed.
        """
        seconds = _WATCH_SECONDS if self._verbose and seconds is None else seconds
        if self._signals.wait(seconds):
            return False
        self._show_logs()
        for child in self._children:
            if not child.alive():
                if not self._verbose:
                    for line in child.tail(_TAIL_LINES):
                        note(f"{child.name} | {line}")
                raise CommandError(f"{child.ending()}; its log is {child.log}", child.exit_code())
        return True

    def _end(self, child: Child) -> None:
        child.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        while child.alive() and time.monotonic() < deadline:
            if self._signals.wait(_WATCH_SECONDS):
                break
        if child.alive():
            note(f"{child.name} is being killed")
        child.kill()

    def _show_logs(self) -> None:
        if self._verbose:
            for child in self._children:
                for line in child.news():
                    note(f"{child.name} | {line}")
