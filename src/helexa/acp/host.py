"""Access of tools to files and commands: the interface `Host`, and `LocalHost`."""

import asyncio
import os
import shutil
import signal
import stat
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import StringIO
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

MAX_FILE_BYTES = 16 << 20
_GRACE_SECONDS = 1.0  # time between SIGTERM and SIGKILL
_CHUNK_BYTES = 1 << 16


class ToolError(Exception):
    """A tool call failed. The message is shown to the model and the user."""


class HostError(ToolError):
    """The host could not access a file or run a command."""


@dataclass(frozen=True, slots=True)
class Client:
    """The features of the client (the editor), and a function that sends it requests."""

    # Sends a JSON-RPC request (method, params) and returns the result. Raises a HostError if the editor fails.
    request: Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
    reads_files: bool = False  # whether the editor supports `fs/read_text_file`
    writes_files: bool = False  # whether the editor supports `fs/write_text_file`
    runs_commands: bool = False  # whether the editor supports the `terminal/*` methods


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a shell command."""

    exit_code: int | None  # exit code, or None if a signal ended the command or the exit code is unknown
    signal: str | None  # name of the signal that ended the command, or None
    output: str  # interleaved stdout and stderr. If the output is too long, only its end.
    truncated: bool = False  # whether the beginning of the output was dropped
    timed_out: bool = False  # whether the command was killed after its timeout


class Host(Protocol):
    """Access to files and commands for the tools of one session.

    Callers pass absolute paths. A `Boundary` must have checked that the session may access the paths. The editor does
    the operations that it supports, except in the agent's own folders. If such an operation fails, the method raises
    HostError and does not repeat the operation on this machine. All other operations are done on this machine.
    """

    async def read_text(self, path: Path, *, line: int | None = None, limit: int | None = None) -> str:
        """Return the text of a file, or only a range of its lines.

        The range begins at line `line`, counted from 1, and has at most `limit` lines. If `line` is None, the range
        begins at the first line. If `limit` is None, the range ends at the last line. If the editor reads the file, the
        text includes unsaved changes.

        Raises:
            HostError: the file is missing, not text, or too large.
        """
        ...

    async def read_bytes(self, path: Path) -> bytes:
        """Return the contents of a file on this machine. The editor can read only text.

        Raises:
            HostError: the file is missing or too large.
        """
        ...

    async def write_text(self, path: Path, text: str) -> None:
        """Create or replace a text file, and create missing parent folders.

        Raises:
            HostError: the file cannot be written.
        """
        ...

    async def run(
        self,
        command: str,
        *,
        cwd: Path,
        timeout_s: float,
        output_limit: int,
        started: Callable[[str | None], Awaitable[None]],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> CommandResult:
        """Run a shell command until it ends, and return its output.

        After `timeout_s`, or on cancellation, the command and its child processes are killed.

        Args:
            command: command line for the shell.
            cwd: working directory.
            timeout_s: timeout in seconds.
            output_limit: maximum number of output bytes to return; the oldest bytes are dropped first.
            started: called once when the command has started, with the id of the editor's terminal. The id is None
                for a command that runs on this machine directly.
            environment: additional environment variables of the command.

        Raises:
            HostError: the command could not be started, or the editor failed.
        """
        ...


class LocalHost:
    """Accesses files and runs commands on this machine, without the editor.

    Commands do not inherit environment variables whose whole value is one of the secrets.
    """

    def __init__(self, secrets: Collection[str] = ()) -> None:
        self._secrets = frozenset(secrets)

    async def read_text(self, path: Path, *, line: int | None = None, limit: int | None = None) -> str:
        """Return the text of a file on this machine; see `Host`."""
        return await asyncio.to_thread(_read, path, line, limit)

    async def read_bytes(self, path: Path) -> bytes:
        """Return the contents of a file on this machine; see `Host`."""
        return await asyncio.to_thread(_read_bytes, path)

    async def write_text(self, path: Path, text: str) -> None:
        """Create or replace a text file on this machine; see `Host`."""
        await asyncio.to_thread(_write, path, text)

    async def run(
        self,
        command: str,
        *,
        cwd: Path,
        timeout_s: float,
        output_limit: int,
        started: Callable[[str | None], Awaitable[None]],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> CommandResult:
        """Run a shell command on this machine; see `Host`.

        When the command ends, the background processes that it started are killed.
        """
        output = _Output(output_limit)
        try:
            process = await self._start(command, cwd, output, environment)
            try:
                await started(None)
                timed_out = not await _wait_for_exit(process, timeout_s)
                if timed_out:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGTERM)
                    await _wait_for_exit(process, _GRACE_SECONDS)
            finally:
                # End the background processes of the command. On cancellation, also end the command itself.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        finally:
            output.close()
        code = process.returncode or 0
        return CommandResult(
            exit_code=code if code >= 0 else None,
            signal=signal.Signals(-code).name if code < 0 else None,
            output=output.text(),
            truncated=output.truncated,
            timed_out=timed_out,
        )

    async def _start(
        self, command: str, cwd: Path, output: "_Output", environment: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        environ = {name: value for name, value in os.environ.items() if value not in self._secrets}
        with output.writer() as writer:
            try:
                return await asyncio.create_subprocess_exec(
                    *shell(command),
                    cwd=cwd,
                    env=environ | PAGER_ENVIRONMENT | dict(environment),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=writer,
                    stderr=writer,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:  # ValueError: NUL in the command
                raise HostError(f"the command could not be started: {_reason(error)}; correct the command") from error


PAGER_ENVIRONMENT = {"PAGER": "cat", "GIT_PAGER": "cat"}  # commands must not wait for a pager


def shell(command: str) -> list[str]:
    """Return the argument list with which the host runs a command line in a shell.

    The shell is bash if bash is installed, because models write commands for bash. Otherwise, the shell is sh.
    """
    return ["bash" if shutil.which("bash") else "sh", "-c", command]


def check_size(path: Path) -> None:
    """Check that a file of the host is small enough to be read as a whole.

    A missing file passes the check.

    Raises:
        HostError: the file is larger than `MAX_FILE_BYTES`.
    """
    with suppress(OSError):
        if path.stat().st_size > MAX_FILE_BYTES:
            raise HostError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB; read parts of it with a shell command")


class _Output:
    """A pipe for the output of a process.

    The event loop reads the pipe and stores only the newest `limit` bytes.
    """

    def __init__(self, limit: int) -> None:
        self.truncated = False
        self._limit = limit
        self._newest = bytearray()
        self._pipe, self._writer = os.pipe()
        os.set_blocking(self._pipe, False)
        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    @contextmanager
    def writer(self) -> Iterator[int]:
        """Yield the pipe's write end, to start a child process with it.

        After the `with` block, the write end is closed in this process.
        """
        try:
            yield self._writer
        finally:
            os.close(self._writer)

    def close(self) -> None:
        """Read the remaining bytes and close the pipe."""
        asyncio.get_running_loop().remove_reader(self._pipe)
        # A detached process may write forever, so the number of reads is limited. 64 reads of `_CHUNK_BYTES` are more
        # than a pipe can contain.
        for _ in range(64):
            if not self._read():
                break
        os.close(self._pipe)

    def text(self) -> str:
        """Return the stored bytes as text, without a partial character at the start."""
        data = bytes(self._newest)
        if self.truncated:
            data = data[next((index for index in range(min(4, len(data))) if data[index] & 0xC0 != 0x80), 0) :]
        return data.decode(errors="replace")

    def _read(self) -> bool:
        try:
            data = os.read(self._pipe, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(self._pipe)
            return False
        self._newest += data
        if len(self._newest) > self._limit:
            self.truncated = True
            del self._newest[: len(self._newest) - self._limit]
        return True


async def _wait_for_exit(process: asyncio.subprocess.Process, seconds: float) -> bool:
    """Wait until the process ends, at most `seconds`. Return whether it ended."""
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        return False
    return True


def _read_bytes(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise HostError(f"{path} cannot be read: {_reason(error)}; find files with list_dir or glob") from error
    with open(descriptor, "rb") as file:  # noqa: PTH123
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise HostError(f"{path} is not a file but a folder, pipe or device; name a regular file")
        check_size(path)
        return file.read(MAX_FILE_BYTES)


def _read(path: Path, line: int | None, limit: int | None) -> str:
    data = _read_bytes(path)
    if b"\0" in data:
        raise HostError(
            f"{path} is not text, because the file has NUL bytes; read the file with a shell command such as `od -c`"
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise HostError(
            f"{path} is not UTF-8 text: the byte at offset {error.start} is invalid; read the file with a command such "
            "as `iconv` or `od -c`"
        ) from error
    if line is None and limit is None:
        return text
    start = (line or 1) - 1
    return "".join(islice(StringIO(text), start, None if limit is None else start + limit))


def _write(path: Path, text: str) -> None:
    try:
        data = text.encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb") as file:  # noqa: PTH123
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise HostError(f"{path} is not a file but a pipe or device; name a regular file")
            file.truncate()
            file.write(data)
    except (OSError, ValueError) as error:  # ValueError: lone surrogate
        raise HostError(f"{path} cannot be written: {_reason(error)}; write another file, or ask the user") from error


def _reason(error: Exception) -> str:
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
