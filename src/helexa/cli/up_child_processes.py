"""The server processes of `helexa up`: start, watch, stop signals, end."""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

from helexa.cli import exec_with_parent
from helexa.cli.terminal_output_and_errors import CONFIG, CommandError, note, printable
from helexa.cli.up_state_keys_and_logs import MAX_BYTES, limit_size

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Records SIGINT, SIGTERM and SIGHUP for the method `wait`.

    In the `with` block, these signals do not end or interrupt this process. SIGCHLD (a child process ended) is recorded
    too. Stop signals that were ignored when the command started, for example because of `nohup`, stay ignored. The
    block must run in the main thread.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._former: dict[signal.Signals, Any] = {}
        self._wakeup = -1

    def __enter__(self) -> Self:
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*_STOPS, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                self._former[number] = signal.signal(number, _noted)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)
        signal.set_wakeup_fd(self._wakeup)
        self._reader.close()
        self._writer.close()

    def wait(self, seconds: float | None) -> bool:
        """Wait until a signal arrives, at most `seconds`.

        Return whether a stop signal arrived.

        SIGCHLD also ends the wait. If `seconds` is None, the wait has no time limit.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            ready = selector.select(seconds)
        return bool(ready) and any(number in _STOPS for number in self._reader.recv(4096))


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing.

    Python writes the signal's number to the wake-up socket only if the signal has a handler.
    """


_TAIL_BYTES = 16 * 1024


class Child:
    """A server process of `helexa up`, which runs a Python module.

    The process runs in a separate session of the operating system, so Ctrl-C on the terminal does not interrupt it.
    """

    def __init__(self, module: str, arguments: list[str], log: Path, environ: dict[str, str]) -> None:
        """Start `python -m module arguments`, and append its output to the file `log`.

        On Linux, the process receives SIGTERM if this process dies.
        """
        self.name = module.rpartition(".")[2]  # name for display
        self.log = log  # path of the file with the process's stdout and stderr
        self._shown = self._begin = log.stat().st_size if log.exists() else 0
        program = [sys.executable, "-P", "-m", module, *arguments]
        with log.open("ab") as file:  # append mode, so that writing continues at the start after `limit_size` truncates
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", exec_with_parent.__file__, str(os.getpid()), *program],
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
        """Kill the process and its children with SIGKILL, and wait until it has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ending(self) -> str:
        """Return how the process ended, as a sentence. Only valid after `alive` was False."""
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} {how}"

    def exit_code(self) -> int:
        """Return the exit code with which `helexa up` fails if this process has ended."""
        return CONFIG if self._process.returncode == CONFIG else 1

    def tail(self, lines: int) -> list[str]:
        """Return the last `lines` log lines of the process, without control characters.

        Empty lines, and lines before the last `_TAIL_BYTES` bytes of the log, are left out.
        """
        with self.log.open("rb") as file:
            size = self.log.stat().st_size
            file.seek(max(self._begin if size >= self._begin else 0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return [printable(line) for line in text.splitlines() if line.strip()][-lines:]

    def news(self) -> list[str]:
        """Return lines that were added to the log file since the last call of `news`.

        Incomplete lines, and lines after `_TAIL_BYTES` bytes, stay for later calls. Control characters are removed.
        """
        with self.log.open("rb") as file:
            self._shown = 0 if self.log.stat().st_size < self._shown else self._shown
            file.seek(self._shown)
            data = file.read(_TAIL_BYTES)
        end = data.rfind(b"\n") + 1 or (len(data) if len(data) == _TAIL_BYTES else 0)
        self._shown += end
        return [printable(line) for line in data[:end].decode(errors="replace").splitlines()]


_STOP_SECONDS = 25.0
_WATCH_SECONDS = 0.2
_LIMIT_SECONDS = 30.0
_TAIL_LINES = 8


class Stack:
    """The server processes of one `helexa up`.

    The end of the `with` block stops the servers in the order of their start. A server that still runs after
    `_STOP_SECONDS`, or at another stop signal, is killed.
    """

    def __init__(self, environ: dict[str, str], verbose: bool) -> None:
        """Create a stack without servers; `start` adds servers."""
        self._environ = environ  # environment variables of the servers
        self._verbose = verbose  # whether to copy the lines of the servers' log files to stderr
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
        """Start a server as `python -m module`, with its output in `log`."""
        self._children.append(Child(module, arguments, log, self._environ))

    def watch(self, seconds: float | None = None) -> bool:
        """Wait until a signal arrives, at most `seconds`.

        If `seconds` is None, wait at most 0.2 s if the logs are copied to stderr, else 30 s.

        Return False if a stop signal such as Ctrl-C arrived, else True.

        Raises:
            CommandError: a server process has ended. The last lines of its log file were printed.
        """
        if seconds is None:
            seconds = _WATCH_SECONDS if self._verbose else _LIMIT_SECONDS
        if self._signals.wait(seconds):
            return False
        self._show_logs()
        for child in self._children:
            limit_size(child.log)
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
            note(f"{child.name} is being killed, because it has not ended")
        child.kill()

    def _show_logs(self) -> None:
        if self._verbose:
            for child in self._children:
                # Bounded, because a running server may write lines faster than they are printed.
                for _ in range(MAX_BYTES // _TAIL_BYTES):
                    lines = child.news()
                    for line in lines:
                        note(f"{child.name} | {line}")
                    if not lines:
                        break
