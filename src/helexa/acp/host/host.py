"""The protocol of access to text files and commands, on this machine or through the client."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from helexa.acp.failure import ToolError


class HostError(ToolError):
    """A file or a command could not be accessed."""


class Client(Protocol):
    """The part of the client that hosts use. `helexa.acp.host.client.open_host` returns a `Host` for a client.

    Attributes:
        reads_files: whether the client has `fs/read_text_file`.
        writes_files: whether the client has `fs/write_text_file`.
        runs_commands: whether the client has `terminal/*`.
    """

    reads_files: bool
    writes_files: bool
    runs_commands: bool

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Call a method of the client. Cancellation sends a cancel request to the client.

        Raises:
            HostError: the client rejected the request, failed, sent an invalid answer, or disconnected.
        """
        ...


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command.

    Attributes:
        exit_code: exit code, or None if a signal ended the command.
        signal: name of the signal that ended the command, or None.
        output: interleaved stdout and stderr, limited to the newest bytes.
        truncated: whether older output is missing.
        timed_out: whether the command was killed after its timeout.
    """

    exit_code: int | None
    signal: str | None
    output: str
    truncated: bool = False
    timed_out: bool = False


class Host(Protocol):
    """Files and commands of one session, on this machine or through the client.

    Paths are absolute and checked by `Boundary`. This machine is used only for capabilities that the client lacks. If
    the client has a capability but fails, the method raises HostError.
    """

    async def read_text(self, path: Path, *, line: int | None = None, limit: int | None = None) -> str:
        """Return the text of a file, or `limit` lines beginning at `line` (counted from 1).

        A file read through an editor includes unsaved changes.

        Raises:
            HostError: the file is missing, not text, or too large.
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
    ) -> CommandResult:
        """Run a shell command to its end.

        After `timeout_s`, or on cancellation, the command and its children are killed.

        Args:
            command: command line for the shell.
            cwd: working directory.
            timeout_s: timeout in seconds.
            output_limit: maximum number of output bytes to return; the oldest bytes are dropped first.
            started: called once with the client's terminal id, or with None for a local command.

        Raises:
            HostError: the command could not be started, or the client failed.
        """
        ...
