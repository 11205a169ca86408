"""Starts and ends an engine process, and copies its log lines to the server's log."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import Context

from helexa.neuron.engine.ipc.environment import ENVIRONMENT
from helexa.neuron.engine_client.pixel_sender import PixelSender
from helexa.neuron.processes import stack_traces
from helexa.neuron.processes.heartbeat import Heartbeat

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "helexa.neuron.engine.process")

_LINE_BYTES = 1 << 20
_STACKS_SECONDS = 3.0
_QUIET_SECONDS = 0.5


class Child:
    """An engine process, which `spawn` starts in a separate POSIX session.

    The engine process watches a pipe from the server process (this process), and ends when the server process ends.

    Attributes:
        pid: process id of the engine.
        reader, writer: the server's end of the socket to the engine.
        pixels: sender of the pixels of images to the engine.
        kill_reason: the reason why the server killed the engine, as text for users; None if the server did not kill the
            engine.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        heartbeat: Heartbeat,
        pixels: PixelSender,
    ) -> None:
        self.pid = process.pid
        self.reader = reader
        self.writer = writer
        self.pixels = pixels
        self.kill_reason: str | None = None
        self._process = process
        self._heartbeat = heartbeat
        self._ended = False
        self._last_line = ""
        self._logged = asyncio.Event()
        # A new context, so that log lines are not attributed to the request that loads the model.
        self._stderr = asyncio.create_task(self._log_stderr(), context=Context())

    @classmethod
    async def spawn(cls, command: Sequence[str] | None = None) -> "Child":
        """Start an engine process. The process loads a model when the server sends it the message `Load`.

        Args:
            command: command line of the process; None for `COMMAND`. The method appends the options `--fd` (file
                descriptor of the socket), `--pixels-fd` (file descriptor of the socket for pixels) and `--heartbeat-fd`
                (file descriptor of the shared memory in which the engine counts its progress).

        Raises:
            OSError: the system has run out of file descriptors, memory or processes.
        """
        heartbeat = Heartbeat()
        try:
            process, reader, writer, pixels = await _start(command or COMMAND, heartbeat.fd)
        except BaseException:
            heartbeat.close()
            raise
        finally:
            heartbeat.release_fd()
        return cls(process, reader, writer, heartbeat, pixels)

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.returncode is None

    @property
    def progress(self) -> int:
        """The engine's progress count, which grows during a step and while the engine loads; 0 after `end`."""
        return 0 if self._ended else self._heartbeat.count

    @property
    def expected_step_seconds(self) -> float:
        """Expected duration of the engine's step in progress; 0 if it is unknown, or after `end`."""
        return 0.0 if self._ended else self._heartbeat.expected_seconds

    async def log_stacks(self) -> None:
        """Make the engine process log the stacks of its threads: of Python functions, then of native functions.

        The method waits until the engine logs nothing for half a second, but at most 3 seconds per request.
        """
        for number in (stack_traces.PYTHON_SIGNAL, stack_traces.NATIVE_SIGNAL):
            self.signal(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(_STACKS_SECONDS):
                    while self.alive:
                        self._logged.clear()
                        await asyncio.wait_for(self._logged.wait(), _QUIET_SECONDS)

    async def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for the process to end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send the signal `number` to the engine process and to the processes that it has started."""
        if self._ended:
            return  # the process id may belong to another process now
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def end(self, grace: float) -> None:
        """Wait `grace` seconds for the process to end. If it still runs, send SIGTERM, then SIGKILL.

        Afterwards, close the socket and free the shared memory of the progress count.
        """
        if self._ended:
            return
        for seconds, force in ((grace, signal.SIGTERM), (min(grace, 2.0), signal.SIGKILL)):
            await self.wait(seconds)
            if self.alive:
                self.signal(force)
        await self._process.wait()
        self.signal(signal.SIGKILL)  # a compiler process may be left
        self._ended = True
        self._heartbeat.close()
        self.pixels.close()
        await asyncio.wait([self._stderr], timeout=1.0)  # a grandchild may hold the pipe open
        self._stderr.cancel()
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    def ending(self) -> str:
        """Return why the process ended, as text for users, for example with its exit code or signal."""
        if self.kill_reason is not None:
            return self.kill_reason
        code = self._process.returncode
        if code is not None and code < 0:
            reason = f"was ended by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -9 else "")
        else:
            reason = f"ended with exit code {code}"
        return f"the engine process {reason}" + (f" ({self._last_line[:300]})" if self._last_line else "")

    async def _log_stderr(self) -> None:
        assert self._process.stderr is not None
        while True:
            try:
                line = await self._process.stderr.readline()
            except ValueError:
                continue  # a line beyond the limit is dropped
            if not line:
                return
            self._logged.set()
            text = line.decode(errors="replace").strip()
            if text:
                level, _, message = text.partition(" ")  # the level in the engine's log format
                level_number = logging.getLevelNamesMapping().get(level)
                self._last_line = message.partition(": ")[2] or message if level_number else text
                log.log(level_number or logging.INFO, "engine %d: %s", self.pid, message if level_number else text)


async def _start(
    command: Sequence[str], heartbeat_fd: int
) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter, PixelSender]:
    """Start an engine process that is connected to this process by two socket pairs.

    Returns:
        The process, the reader and the writer of this process's end of the first socket pair, and the sender of pixels
        through the second socket pair.
    """
    parent_socket, child_socket = socket.socketpair()
    pixel_socket, child_pixel_socket = socket.socketpair()
    pixels = PixelSender(pixel_socket)
    with child_socket, child_pixel_socket:
        reader, writer = await asyncio.open_connection(sock=parent_socket)
        try:
            # In a new session, Ctrl-C on the terminal reaches the server only, which then ends its engines.
            # The engine watches the pipe on its standard input, which closes when this process ends.
            process = await asyncio.create_subprocess_exec(
                *command,
                "--fd",
                str(child_socket.fileno()),
                "--pixels-fd",
                str(child_pixel_socket.fileno()),
                "--heartbeat-fd",
                str(heartbeat_fd),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=ENVIRONMENT | os.environ,
                pass_fds=(child_socket.fileno(), child_pixel_socket.fileno(), heartbeat_fd),
                start_new_session=True,
                limit=_LINE_BYTES,
            )
        except BaseException:
            writer.close()
            pixels.close()
            raise
    return process, reader, writer, pixels


Spawn = Callable[[], Awaitable[Child]]
"""Type of functions that start an engine process."""
