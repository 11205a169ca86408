"""Starts and ends an engine process, and copies its log lines to the server's log."""

import asyncio
import errno
import logging
import os
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import Context
from typing import TYPE_CHECKING

from helexa.core.errors import HelexaError
from helexa.neuron.engine_client.early_start import COMMAND, EngineProcess, take_early
from helexa.neuron.processes import stack_traces_and_exit_reasons
from helexa.neuron.processes.stack_traces_and_exit_reasons import exit_reason

if TYPE_CHECKING:
    from helexa.neuron.vision.shared_pixels import SharedPixels


log = logging.getLogger(__name__)

_LINE_BYTES = 1 << 20
_STACKS_SECONDS = 3.0
_QUIET_SECONDS = 0.5

_PAUSE_SECONDS = 0.02


class PixelSender:
    """The server's end of an engine process's socket for pixels (see `PixelReceiver`)."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(False)

    async def send(self, request: int, pixels: "Sequence[SharedPixels]") -> None:
        """Send the pixels of request `request`; wait while the socket is full.

        If the engine has ended, the pixels are dropped.
        """
        waiting = deque(pixels)
        while waiting:
            if self._send(request, waiting[0]):
                waiting.popleft()
            else:
                await asyncio.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()

    def _send(self, request: int, image: "SharedPixels") -> bool:
        from helexa.neuron.engine.ipc.message_and_pixel_sockets import REQUEST  # slow import that a start does not need

        try:
            socket.send_fds(self._connection, [REQUEST.pack(request)], [image.descriptor])
        except BlockingIOError:
            return False
        except OSError as error:
            # The operating system limits the descriptors that are sent but not received (ETOOMANYREFS), so the caller
            # must try again. Other errors mean that the engine has ended.
            return error.errno != errno.ETOOMANYREFS
        return True


class Child:
    """An engine process of this server process, which `spawn` starts."""

    def __init__(
        self,
        process: EngineProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stderr: asyncio.StreamReader,
        stderr_transport: asyncio.ReadTransport,
    ) -> None:
        self.pid = process.popen.pid
        self.reader = reader
        self.writer = writer
        self.pixels = PixelSender(process.pixels)
        # the reason why the server killed the engine, as text for users; None if the server did not kill the engine
        self.kill_reason: str | None = None
        self._popen = process.popen
        self._heartbeat = process.heartbeat
        self._exit = _exit_of(process.popen)
        self._ended = False
        self._last_line = ""
        self._logged = asyncio.Event()
        self._stderr_transport = stderr_transport
        # A new context, so that log lines are not attributed to the request that loads the model.
        self._stderr = asyncio.create_task(self._log_stderr(stderr), context=Context())

    @classmethod
    async def spawn(cls, command: Sequence[str] | None = None) -> "Child":
        """Start an engine process, which waits for the message `Load`.

        Args:
            command: command line of the process (see `EngineProcess`). None for the process that this program has
                started early, or for `COMMAND` if there is no such process.

        Raises:
            HelexaError: the system has run out of file descriptors, memory or processes.
        """
        process = take_early() if command is None else None
        try:
            process = process or EngineProcess(command or COMMAND)
        except OSError as error:
            raise HelexaError(
                f"no engine process can start: {error.strerror or error}; free memory, or raise the node's limits of "
                "processes and open files"
            ) from error
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection(sock=process.connection)
            stderr = asyncio.StreamReader(limit=_LINE_BYTES)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stderr), process.popen.stderr
            )
        except BaseException:  # a caller that is canceled here has no `Child` to end
            if writer is not None:
                writer.close()  # before its socket, so that the event loop forgets the descriptor
            process.close()
            raise
        return cls(process, reader, writer, stderr, transport)

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._popen.returncode is None

    @property
    def ended_by_bad_read(self) -> bool:
        """Whether a read of a truncated or unreadable file ended the process."""
        return self.kill_reason is None and self._popen.returncode == -signal.SIGBUS

    @property
    def progress(self) -> int:
        """Count of the engine's progress in a step or a load; 0 after `end`."""
        return 0 if self._ended else self._heartbeat.count

    @property
    def expected_step_seconds(self) -> float:
        """Expected duration of the current step; 0 if unknown or after `end`."""
        return 0.0 if self._ended else self._heartbeat.expected_seconds

    async def log_stacks(self) -> None:
        """Make the engine log its threads' stack traces: Python's, then native ones.

        For each of the two kinds, the method waits until the engine logs nothing for half a second, at most 3 seconds.
        """
        for number in (stack_traces_and_exit_reasons.PYTHON_SIGNAL, stack_traces_and_exit_reasons.NATIVE_SIGNAL):
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
                await asyncio.wait([self._exit])

    def signal(self, number: signal.Signals) -> None:
        """Send the signal `number` to the engine process and its children."""
        if self._ended:
            return  # the process id may belong to another process now
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def end(self, grace: float) -> None:
        """Wait `grace` seconds for the process to end, then send SIGTERM, then SIGKILL.

        If the calling task is canceled, a later call continues with what is left to do.
        """
        if not self._ended:
            for seconds, force in ((grace, signal.SIGTERM), (min(grace, 2.0), signal.SIGKILL)):
                await self.wait(seconds)
                if self.alive:
                    self.signal(force)
            await asyncio.wait([self._exit])
            self.signal(signal.SIGKILL)  # a compiler process may be left
            self._ended = True
            self._heartbeat.close()
            self.pixels.close()
        try:
            await asyncio.wait([self._stderr], timeout=1.0)  # a grandchild may hold the pipe open
        finally:
            self._stderr.cancel()
            self._stderr_transport.close()
            assert self._popen.stdin is not None
            self._popen.stdin.close()
            self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    def ending(self) -> str:
        """Return why the process ended, as text for users."""
        if self.kill_reason is not None:
            return self.kill_reason
        reason = exit_reason(self._popen.returncode)
        return f"the engine process {reason}" + (f" ({self._last_line[:300]})" if self._last_line else "")

    async def _log_stderr(self, stderr: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stderr.readline()
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
                line = message if level_number else text
                log.log(level_number or logging.INFO, "%s", f"engine pid={self.pid}: {line}")


def _exit_of(popen: "subprocess.Popen[bytes]") -> "asyncio.Future[None]":
    """Return a future, done when the process exits. A thread waits for the exit."""
    loop = asyncio.get_running_loop()
    exited = loop.create_future()

    def report() -> None:
        if not exited.done():
            exited.set_result(None)

    def wait() -> None:
        popen.wait()
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(report)

    threading.Thread(target=wait, name="engine-exit", daemon=True).start()
    return exited


Spawn = Callable[[], Awaitable[Child]]  # type of functions that start an engine process


class WarmStandby:
    """Keeps at most one warm standby: a started engine process without a model.

    A standby process has already done the part of its start that does not depend on the model, such as the import of
    torch.
    """

    def __init__(self, spawn: Spawn = Child.spawn) -> None:
        self._spawn = spawn
        self._child: Child | None = None
        self._starting = asyncio.Lock()

    async def begin(self) -> None:
        """Start a standby process, unless there is one already."""
        async with self._starting:
            if self._child is not None and not self._child.alive:
                await self._end()
            if self._child is None:
                self._child = await self._spawn()

    async def take(self) -> Child:
        """Return the standby process if it runs, else a new engine process."""
        async with self._starting:
            if self._child is not None and self._child.alive:
                child, self._child = self._child, None
                return child
            await self._end()
        return await self._spawn()

    async def close(self) -> None:
        """End the standby process if there is one."""
        async with self._starting:
            await self._end()

    async def _end(self) -> None:
        if self._child is not None:
            await self._child.end(grace=0.0)
            self._child = None  # last, so that the next call ends the process if this call is canceled
