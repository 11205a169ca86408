"""Starts an engine process without an event loop, before other imports."""

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from helexa.neuron.engine.ipc import ENVIRONMENT
from helexa.neuron.processes.heartbeat import Heartbeat

COMMAND = (sys.executable, "-P", "-m", "helexa.neuron.engine.process")


class EngineProcess:
    """An engine process that can start early, with its sockets and pipes.

    The engine process watches the pipe on its standard input, and ends when this program ends.

    Args:
        command: command line of the process. The options `--fd` (file descriptor of the socket), `--pixels-fd` (file
            descriptor of the socket for pixels) and `--heartbeat-fd` (file descriptor of the shared memory in which
            the engine counts its progress) are appended.

    Raises:
        OSError: the system has run out of file descriptors, memory or processes.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.heartbeat = Heartbeat()
        try:
            self.connection, child_socket = socket.socketpair()
            self.pixels, child_pixel_socket = socket.socketpair()
            with child_socket, child_pixel_socket:
                descriptors = (child_socket.fileno(), child_pixel_socket.fileno(), self.heartbeat.fd)
                names = ("--fd", "--pixels-fd", "--heartbeat-fd")
                options = [str(word) for option in zip(names, descriptors, strict=True) for word in option]
                # The process gets a new session, so that Ctrl-C on the terminal reaches only this program, which then
                # ends its engines.
                self.popen = subprocess.Popen(
                    [*command, *options],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=ENVIRONMENT | os.environ,
                    pass_fds=descriptors,
                    start_new_session=True,
                )
        except BaseException:
            self.heartbeat.close()
            for connection in (getattr(self, "connection", None), getattr(self, "pixels", None)):
                if connection is not None:
                    connection.close()
            raise
        finally:
            self.heartbeat.release_fd()

    def close(self) -> None:
        """End a process that no `Child` uses yet, and close its sockets and pipes."""
        self.popen.kill()
        self.popen.wait()
        self.heartbeat.close()
        for stream in (self.connection, self.pixels, self.popen.stdin, self.popen.stderr):
            if stream is not None:
                stream.close()


class _Early:
    process: EngineProcess | None = None


def start_early() -> None:
    """Start this program's first engine process early; may raise `OSError`."""
    _Early.process = EngineProcess(COMMAND)
    atexit.register(_end_early)


def take_early() -> EngineProcess | None:
    """Return the running process that `start_early` started; None if there is none.

    Only the first call returns the process.
    """
    if _Early.process is not None and _Early.process.popen.poll() is not None:
        _end_early()
    process, _Early.process = _Early.process, None
    return process


def _end_early() -> None:
    process, _Early.process = _Early.process, None
    if process is not None:
        process.close()
