"""An engine as a process of the operating system: its start, its log and its end."""

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
from helexa.neuron.processes.heartbeat import Heartbeat

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "helexa.neuron.engine.process")

_LINE_BYTES = 1 << 20


class Child:
    """A process in a session of its own, which ends with this one: it holds a lifeline. Made by `spawn`.

    Attributes:
        pid: its number.
        reader, writer: this process's end of a socket between the two.
        verdict: what it was killed for, if that was decided here.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        heartbeat: Heartbeat,
    ) -> None:
        self.pid = process.pid
        self.reader = reader
        self.writer = writer
        self.verdict: str | None = None
        self._process = process
        self._heartbeat = heartbeat
        self._ended = False
        self._last_line = ""
        # In a context of its own: its lines are not of the request that loads the model.
        self._stderr = asyncio.create_task(self._log_stderr(), context=Context())

    @classmethod
    async def spawn(cls, command: Sequence[str] | None = None) -> "Child":
        """Start an engine, which is told by its socket what to load.

        Args:
            command: the command line instead of the usual one; `--fd` with the socket's descriptor and `--heartbeat-fd`
                with the heartbeat's are appended.

        Raises:
            OSError: the system has no descriptor, memory or process left for it.
        """
        heartbeat = Heartbeat()
        try:
            process, reader, writer = await _start(command or COMMAND, heartbeat.fd)
        except BaseException:
            heartbeat.close()
            raise
        finally:
            heartbeat.release_fd()
        return cls(process, reader, writer, heartbeat)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.returncode is None

    @property
    def progress(self) -> int:
        """A count that grows while the engine advances, also within a step or while it loads."""
        return 0 if self._ended else self._heartbeat.count

    async def wait(self, seconds: float) -> None:
        """Wait until it has ended, but not longer than that."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and whatever it has started."""
        if self._ended:
            return  # by now the number may be somebody else's
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def end(self, grace: float) -> None:
        """Wait for it to end, by force after `grace` seconds; nothing that it has started is left."""
        if self._ended:
            return
        for seconds, force in ((grace, signal.SIGTERM), (min(grace, 2.0), signal.SIGKILL)):
            await self.wait(seconds)
            if self.alive:
                self.signal(force)
        await self._process.wait()
        self.signal(signal.SIGKILL)  # a compiler that it has left behind
        self._ended = True
        self._heartbeat.close()
        await asyncio.wait([self._stderr], timeout=1.0)  # a grandchild may hold the pipe open
        self._stderr.cancel()
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    def ending(self) -> str:
        """How it has ended, in words."""
        if self.verdict is not None:
            return self.verdict
        code = self._process.returncode
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -9 else "")
        else:
            how = f"ended with exit code {code}"
        return f"the engine process {how}" + (f" ({self._last_line[:300]})" if self._last_line else "")

    async def _log_stderr(self) -> None:
        assert self._process.stderr is not None
        while True:
            try:
                line = await self._process.stderr.readline()
            except ValueError:
                continue  # a line beyond the limit is dropped
            if not line:
                return
            text = line.decode(errors="replace").strip()
            if text:
                self._last_line = text
                level, _, rest = text.partition(" ")  # as the engine's own lines begin
                known = logging.getLevelNamesMapping().get(level)
                log.log(known or logging.INFO, "engine %d: %s", self.pid, rest if known else text)


async def _start(
    command: Sequence[str], heartbeat_fd: int
) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
    """Start the process; return it with the reader and the writer of this side's end of the socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            # A session of its own: Ctrl-C on the terminal reaches the server only, which then ends its engines.
            # Standard input is its lifeline: it ends with this process.
            process = await asyncio.create_subprocess_exec(
                *command,
                "--fd",
                str(theirs.fileno()),
                "--heartbeat-fd",
                str(heartbeat_fd),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=ENVIRONMENT | os.environ,
                pass_fds=(theirs.fileno(), heartbeat_fd),
                start_new_session=True,
                limit=_LINE_BYTES,
            )
        except BaseException:
            writer.close()
            raise
    return process, reader, writer


Spawn = Callable[[], Awaitable[Child]]
"""Starts the process of an engine."""
