"""Sandbox processes for untrusted input, with limits on memory and CPU time."""

import atexit
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import BinaryIO, cast

from helexa.neuron.processes.frames import read_frame, write_frame
from helexa.neuron.processes.sandboxed import OUT_OF_MEMORY


class SandboxError(Exception):
    """A sandbox process ended during a request. The message gives the reason, such as an exceeded limit."""


class Sandbox:
    """Pool of sandbox processes, which are started when they are needed.

    The pool is thread-safe. If a process has ended, the pool starts a new one.

    Args:
        module: name of the module that the processes run. The module calls `sandboxed.serve`.
        processes: maximum number of processes.
    """

    def __init__(self, module: str, processes: int) -> None:
        self._command = (sys.executable, "-P", "-m", module)
        self._slots = threading.BoundedSemaphore(processes)
        self._idle: list[_Process] = []
        atexit.register(self.close)

    def request(self, body: bytes, descriptor: int | None = None) -> bytes:
        """Send a request to a process, and return the response. Wait for an idle process if all processes work.

        Args:
            body: body of the request, at most `frames.MAX_BYTES`.
            descriptor: file descriptor to send with the request; None for no descriptor.

        Raises:
            SandboxError: the process exceeded a limit or ended for another reason.
        """
        with self._slots:
            process = self._process()
            response = process.request(body, descriptor)
            if response is None:
                raise SandboxError(process.close())
            self._idle.append(process)
        return response

    def close(self) -> None:
        """End all idle processes. A process that works on a request continues."""
        while (process := self._pop()) is not None:
            process.close()

    def _process(self) -> "_Process":
        while (process := self._pop()) is not None:
            if process.is_running:
                return process
            process.close()
        return _Process(self._command)

    def _pop(self) -> "_Process | None":
        try:
            return self._idle.pop()
        except IndexError:
            return None


class _Process:
    """A running sandbox process. The process ends when its standard input is closed."""

    def __init__(self, command: tuple[str, ...]) -> None:
        # Standard input is a socket, because a pipe cannot carry file descriptors.
        self._channel, standard_input = socket.socketpair()
        with standard_input:
            # In its own process group, the process does not receive Ctrl-C from the terminal.
            self._popen = subprocess.Popen(
                command, stdin=standard_input.fileno(), stdout=subprocess.PIPE, start_new_session=True
            )
        self._stdin = cast(BinaryIO, self._channel.makefile("wb"))
        self._stdout = cast(BinaryIO, self._popen.stdout)

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def request(self, body: bytes, descriptor: int | None) -> bytes | None:
        """Send a request to the process and return its response. Return None if the process ended."""
        try:
            write_frame(self._stdin, body)
            if descriptor is not None:
                socket.send_fds(self._channel, [b"\0"], [descriptor])
        except OSError:
            return None
        return read_frame(self._stdout) or None

    def close(self) -> str:
        """End the process, and return the reason for its end as text.

        The reason is the limit that the process exceeded, or its exit code.
        """
        self._stdout.close()
        with suppress(OSError):
            self._stdin.close()
        self._channel.close()
        self._popen.kill()
        code = self._popen.wait()
        if code == -signal.SIGPROF:
            return "it runs for too long"
        return "it needs too much memory" if code == OUT_OF_MEMORY else f"its process ended with code {code}"
