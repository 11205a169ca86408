"""`helexa logs`: print the logs of the servers of `helexa up`."""

import time
from collections import deque
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, validators

from helexa.cli.flags_and_completion import Switch
from helexa.cli.terminal_output_and_errors import printable
from helexa.cli.up_state_keys_and_logs import LOGS, newest_folder

_POLL_SECONDS = 0.3


def logs(
    server: Literal["node", "gateway"] | None = None,
    /,
    *,
    follow: Annotated[Switch, Parameter(alias="-f")] = False,
    lines: Annotated[int, Parameter(alias="-n", validator=validators.Number(gte=0))] = 50,
    port: int | None = None,
) -> None:
    """Print the last lines of the logs of `helexa up` on this machine.

    Args:
        server: Log to print: node or gateway. Default: both, with the name of the server before each line.
        follow: Print new lines until Ctrl-C.
        lines: Number of lines of each log.
        port: Port of the gateway whose logs to print. Default: the `helexa up` whose log changed last.
    """
    folder = newest_folder(port)
    servers = LOGS if server is None else {server: LOGS[server]}
    readers = [_Reader(folder / name, f"{key} | " if server is None else "") for key, name in servers.items()]
    for reader in readers:
        reader.show_last(lines)
    while follow:
        time.sleep(_POLL_SECONDS)
        for reader in readers:
            reader.show_new()


class _Reader:
    """Prints the lines of one log file, each with a prefix."""

    def __init__(self, log: Path, prefix: str) -> None:
        self._log = log
        self._prefix = prefix
        self._position = 0

    def show_last(self, count: int) -> None:
        self._show(deque(self._lines(), maxlen=count))

    def show_new(self) -> None:
        self._show(self._lines())

    def _lines(self) -> list[bytes]:
        """Return the complete lines that were not returned before."""
        try:
            with self._log.open("rb") as file:
                if self._log.stat().st_size < self._position:
                    self._position = 0  # a new log, or a log whose older lines were moved to another file
                file.seek(self._position)
                data = file.read()
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._position += end
        return data[:end].splitlines()

    def _show(self, lines: deque[bytes] | list[bytes]) -> None:
        for line in lines:
            print(self._prefix + printable(line.decode(errors="replace")), flush=True)
