"""Sandbox processes for untrusted input, with limits on memory and CPU time."""

import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from typing import BinaryIO, cast

from helexa.neuron.processes.inside_sandbox import OUT_OF_MEMORY, read_frame, write_frame

MAX_SILENT_SECONDS = 600.0
"""Seconds after which a process is killed if it has not answered a request.

Usually the limit on CPU time ends a request much earlier. On a very busy machine, a request gets so little CPU time
that this limit is reached first.
"""

_KILL_SECONDS = 2.0


class SandboxError(Exception):
    """A sandbox process ended during a request; the message says why."""


class LimitExceeded(SandboxError):
    """A request exceeded the limit of memory or CPU time, so a retry is useless."""


class ProcessPool:
    """Sandbox processes of one module, shared by several `Sandbox`. Thread-safe.

    All processes end with this program, also those that work on a request.
    """

    def __init__(self, module: str, kept: int) -> None:
        self._module = module  # name of the module that the processes run. The module calls `inside_sandbox.serve`.
        self._kept = kept  # maximum number of idle processes. Further processes end when they become idle.
        self._processes = _Processes()
        self._finalizer = weakref.finalize(self, self._processes.end)  # also runs when this program exits
        _POOLS.add(self)

    def take(self) -> "_Process":
        """Return an idle or new process, to pass to `give_back` or `end` afterwards.

        Raises:
            SandboxError: the program is exiting.
            OSError: no process can start, for example because no file descriptors are left.
        """
        processes = self._processes
        with processes.lock:
            if processes.ended:
                raise SandboxError("no sandbox process can start, because the program is exiting")
            while processes.idle:
                process = processes.idle.pop()
                if process.is_running:
                    break
                process.close()
            else:
                process = _take_spare(self._module) or _Process(self._module)
            processes.working.add(process)
        return process

    def give_back(self, process: "_Process") -> None:
        """Keep `process` for other requests, or end it if enough processes are idle."""
        with self._processes.lock:
            self._processes.working.discard(process)
            if len(self._processes.idle) < self._kept and not self._processes.ended:
                self._processes.idle.append(process)
                return
        process.close()

    def end(self, process: "_Process") -> SandboxError:
        """End `process`, which did not answer, and return the error to raise."""
        with self._processes.lock:
            self._processes.working.discard(process)
        return process.close()

    def close(self) -> None:
        """End all idle processes. The pool stays usable, and running requests continue."""
        with self._processes.lock:
            _close_all(self._processes.idle)

    def end_all(self) -> None:
        """End all processes; waiting and later requests fail."""
        self._finalizer()


_SPARES: "dict[str, _Process]" = {}
_SPARES_LOCK = threading.Lock()


def start_spare(module: str) -> None:
    """Start a sandbox process of `module` before the code that needs it is imported.

    Raises:
        OSError: the system has run out of file descriptors, memory or processes.
    """
    with _SPARES_LOCK:
        if module not in _SPARES:
            _SPARES[module] = _Process(module)


def end_spares() -> None:
    """End all processes that `start_spare` started and no pool took."""
    with _SPARES_LOCK:
        while _SPARES:
            _SPARES.popitem()[1].close()


def _take_spare(module: str) -> "_Process | None":
    with _SPARES_LOCK:
        process = _SPARES.pop(module, None)
    if process is not None and not process.is_running:
        process.close()
        return None
    return process


_POOLS: "weakref.WeakSet[ProcessPool]" = weakref.WeakSet()


def end_sandboxes() -> None:
    """End the processes of all pools, before an exit that skips cleanup."""
    end_spares()
    for pool in list(_POOLS):
        pool.end_all()


class Sandbox:
    """Runs requests in the sandbox processes of a pool. Thread-safe.

    Args:
        processes: maximum number of processes that work on requests of this object at the same time.
    """

    # Several models share a pool, each with its own `Sandbox`. The limit `processes` prevents that slow requests of one
    # model delay those of other models.
    def __init__(self, pool: ProcessPool, processes: int) -> None:
        self._pool = pool
        self._permits = threading.BoundedSemaphore(processes)

    def request(self, body: bytes, descriptor: int | None = None) -> bytes:
        """Send a request to a process, and return the response.

        Args:
            body: body of the request, at most `inside_sandbox.MAX_BYTES`.
            descriptor: file descriptor to send with the request; None for no descriptor.

        Raises:
            LimitExceeded: the request exceeded a limit.
            SandboxError: the process ended for another reason, or does not respond.
            OSError: no process can start.
        """
        with self._permits:
            process = self._pool.take()
            response = process.request(body, descriptor)
            if response is None:
                raise self._pool.end(process)
            self._pool.give_back(process)
        return response

    def end_idle(self) -> None:
        """End the idle processes of the pool. The next request starts a new process."""
        self._pool.close()


class _Processes:
    """The processes of a pool. The lock is held while a process starts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[_Process] = []
        self.working: set[_Process] = set()
        self.ended = False

    def end(self) -> None:
        """End all processes. A request that waits for one of them fails."""
        with self.lock:
            self.ended = True
            _close_all(self.idle)
            for process in self.working:
                process.kill()


def _close_all(processes: "list[_Process]") -> None:
    while processes:
        processes.pop().close()


class _Process:
    """A running sandbox process. The process ends when its standard input is closed."""

    def __init__(self, module: str) -> None:
        # Standard input is a socket, because a pipe cannot carry file descriptors.
        self._channel, standard_input = socket.socketpair()
        with standard_input:
            try:
                # In its own process group, the process does not receive Ctrl-C from the terminal.
                self._popen = subprocess.Popen(
                    (sys.executable, "-P", "-m", module),
                    stdin=standard_input.fileno(),
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
            except BaseException:
                self._channel.close()
                raise
        self._stdin = cast(BinaryIO, self._channel.makefile("wb"))
        self._stdout = cast(BinaryIO, self._popen.stdout)
        self._responds = True

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def request(self, body: bytes, descriptor: int | None) -> bytes | None:
        """Send a request and return the response; None if the process ended or is silent."""
        try:
            write_frame(self._stdin, body)
            if descriptor is not None:
                socket.send_fds(self._channel, [b"\0"], [descriptor])
        except OSError:
            return None
        waiting = select.poll()
        waiting.register(self._stdout, select.POLLIN)
        self._responds = bool(waiting.poll(MAX_SILENT_SECONDS * 1000))
        return (read_frame(self._stdout) or None) if self._responds else None

    def kill(self) -> None:
        """End the process while a thread waits for its response."""
        self._popen.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that reads from a hung disk ends only after the read
            self._popen.wait(_KILL_SECONDS)

    def close(self) -> SandboxError:
        """End the process, and return the error to raise for its request."""
        self._stdout.close()
        with suppress(OSError):
            self._stdin.close()
        self._channel.close()
        self._popen.kill()
        code = self._popen.wait()
        if not self._responds:
            return SandboxError("the sandbox process does not respond")
        if code == -signal.SIGPROF:
            return LimitExceeded("the sandbox process runs for too long")
        if code == OUT_OF_MEMORY:
            return LimitExceeded("the sandbox process needs too much memory")
        return SandboxError(f"the sandbox process ended with code {code}")
