"""The interface through which tools access files and commands, on this machine or through the editor."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from helexa.acp.failure import ToolError


class HostError(ToolError):
    """A file or a command could not be accessed."""


class Client(Protocol):
    """The client (the editor). Sends requests to it, and states which optional methods it supports.

    Attributes:
        reads_files: whether the editor supports `fs/read_text_file`.
        writes_files: whether the editor supports `fs/write_text_file`.
        runs_commands: whether the editor supports the `terminal/*` methods.
    """

    reads_files: bool
    writes_files: bool
    runs_commands: bool

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON-RPC request to the editor and return the result.

        If the calling task is canceled, the editor receives a cancel request.

        Raises:
            HostError: the editor rejected the request, failed, sent an invalid response, or disconnected.
        """
        ...


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a shell command.

    Attributes:
        exit_code: exit code, or None if a signal ended the command.
        signal: name of the signal that ended the command, or None.
        output: interleaved stdout and stderr. If the output is too long, only its end.
        truncated: whether the beginning of the output was dropped.
        timed_out: whether the command was killed after its timeout.
    """

    exit_code: int | None
    signal: str | None
    output: str
    truncated: bool = False
    timed_out: bool = False


class Host(Protocol):
    """Access to files and commands for the tools of one session, through the editor or on this machine.

    Callers pass absolute paths that `Boundary` has checked. This machine is used directly only for operations that
    the editor does not support. If a supported operation of the editor fails, the method raises HostError.
    """

    async def read_text(self, path: Path, *, line: int | None = None, limit: int | None = None) -> str:
        """Return the text of a file, or only `limit` lines beginning at `line` (counted from 1).

        If the editor reads the file, the text includes unsaved changes.

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
