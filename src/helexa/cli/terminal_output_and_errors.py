"""Output and errors of commands: color, progress, JSON, exit codes."""

import json
import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TextIO

from helexa.core.errors import ConfigError, HelexaError, SourceError, UsageError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


USAGE = UsageError.exit_code
CONFIG = ConfigError.exit_code
UNREACHABLE = 3
MODEL_NOT_FOUND = 4

_SOURCE_CODES = {
    "repo_fetch_failed": UNREACHABLE,
    "repo_refused": MODEL_NOT_FOUND,
    "not_cached": MODEL_NOT_FOUND,
    "empty_repo": MODEL_NOT_FOUND,
    "quant_not_found": MODEL_NOT_FOUND,
}


class CommandError(HelexaError):
    """A `helexa` command failed.

    The process prints the message and ends with `exit_code`.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def exit_code(error: HelexaError) -> int:
    """Return the exit code with which a command ends if it failed with `error`."""
    return _SOURCE_CODES.get(error.kind, 1) if isinstance(error, SourceError) else error.exit_code


_RAW_CONTROLS = {code: f"\\u{code:04x}" for code in (0x7F, *range(0x80, 0xA0))}


def json_text(value: object, indent: int | None = None) -> str:
    """Return a value as JSON for the terminal, with all control characters escaped.

    `indent` is as in `json.dumps`.
    """
    return json.dumps(value, ensure_ascii=False, indent=indent).translate(_RAW_CONTROLS)


PROGRESS_DELAY_SECONDS = 0.5
_WIDTH_OF_BAR = 70

_CONTROLS = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Return `text` without control characters, except for newlines and tabs."""
    return text.translate(_CONTROLS)


def _has_color(stream: TextIO) -> bool:
    """Return whether colors can be written to `stream`.

    The result is False if the environment variable `NO_COLOR` is set, else True if `FORCE_COLOR` is set. If neither
    is set, the result is True for a terminal with colors.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def dim(text: str, stream: TextIO) -> str:
    """Return `text` in a fainter color if `stream` supports color."""
    return f"\x1b[2m{text}\x1b[0m" if _has_color(stream) else text


def note(text: str) -> None:
    """Print `text` unchanged as one faint line on stderr. Write errors are ignored."""
    with suppress(OSError):
        print(dim(text, sys.stderr), file=sys.stderr, flush=True)


class Progress:
    """A context manager that shows on stderr what a command is waiting for.

    On a terminal, the progress is a bar, elsewhere plain lines of text. Nothing is shown in the first half second.
    """

    def __init__(self, plain: bool = False) -> None:
        """Start the half second in which nothing is shown.

        If `plain`, print lines of text even on a terminal.
        """
        self._plain = plain or not sys.stderr.isatty()
        self._started = time.monotonic()
        self._bar: Bar | None = None
        self._task: Any = None
        self._last = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, text: str, fraction: float | None = None) -> None:
        """Show `text`, the reason why the command waits.

        Args:
            text: one line of text.
            fraction: completed fraction from 0 to 1, or None if unknown.
        """
        if time.monotonic() - self._started < PROGRESS_DELAY_SECONDS:
            return
        if self._plain:
            if text != self._last:
                print(text, file=sys.stderr, flush=True)
        else:
            self._draw(text, fraction)
        self._last = text

    def _draw(self, text: str, fraction: float | None) -> None:
        bar = self._bar
        if bar is None:
            bar = self._bar = _bar()
            bar.start()
        if text != self._last:
            if self._task is not None:
                bar.remove_task(self._task)
            self._task = bar.add_task(text, total=None)
        bar.update(self._task, total=None if fraction is None else 1.0, completed=fraction or 0.0)
        bar.refresh()


def _bar() -> "Bar":
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    console = Console(stderr=True)
    one_line = Column(no_wrap=True, ratio=1, overflow="ellipsis")
    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False, table_column=one_line)]
    if console.width >= _WIDTH_OF_BAR:
        columns.append(BarColumn(bar_width=20))
    columns += [TaskProgressColumn(), TimeRemainingColumn(elapsed_when_finished=True)]
    return Bar(*columns, console=console, transient=True, auto_refresh=False, expand=True)
