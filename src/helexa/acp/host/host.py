"""The port to the text of files and to commands, which may be the client's."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from helexa.acp.failure import ToolError


class HostError(ToolError):
    """A file or a command could not be had."""


class Client(Protocol):
    """The client, as far as a host needs it. `helexa.acp.host.client.open_host` makes a Host of it.

    Attributes:
        reads_files: it offers `fs/read_text_file`.
        writes_files: it offers `fs/write_text_file`.
        runs_commands: it offers `terminal/*`.
    """

    reads_files: bool
    writes_files: bool
    runs_commands: bool

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Call a method of the client; when cancelled, the client is told to drop it.

        Raises:
            HostError: it refused, failed, answered nonsense or is gone.
        """
        ...


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended.

    Attributes:
        exit_code: None where a signal ended it.
        signal: its name, where one ended it.
        output: stdout and stderr as they came, cut to the limit.
        truncated: whether something was cut.
        timed_out: it was killed because its time was over.
    """

    exit_code: int | None
    signal: str | None
    output: str
    truncated: bool = False
    timed_out: bool = False


class Host(Protocol):
    """Files and commands of one session, on this machine or through the client. Paths are absolute, of a Boundary.

    A refusal or failure of the client is a HostError, whatever it was; only what is not offered at all goes local.
    """

    async def read_text(self, path: Path, *, line: int | None = None, limit: int | None = None) -> str:
        """A text file, from `line` (from 1) for `limit` lines; an editor answers with what is not saved yet.

        Raises:
            HostError: there is none, it is no text, or too large.
        """
        ...

    async def write_text(self, path: Path, text: str) -> None:
        """Replace or make a text file and the folders above it.

        Raises:
            HostError: it cannot be written.
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
        """Run a shell command to its end; after `timeout_s`, or when cancelled, it is killed with its children.

        Args:
            command: for `sh -c`.
            cwd: where it runs.
            timeout_s: seconds it may take.
            output_limit: bytes of output kept, the newest.
            started: called once with the client's terminal id, or None where it runs locally.

        Raises:
            HostError: it could not be started, or the client failed.
        """
        ...
