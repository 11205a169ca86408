"""Shows the progress of a model download as a bar on a terminal, and prints a final line with size and speed."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self, TextIO

from helexa.cli.terminal import PROGRESS_DELAY_SECONDS, note, printable, size_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_DOING = {
    "list": "looking up",
    "wait": "waiting for another download of",
    "download": "fetching",
    "unpack": "unpacking",
    "tokenizer": "reading the tokenizer of",
}
_FORBIDDING = ("HF_HUB_DISABLE_PROGRESS_BARS", "CI")
_YES = ("1", "on", "yes", "true")
_WIDTH_OF_BAR = 70
_WIDTH_OF_ALL = 100


class DownloadBar:
    """A context manager that shows the progress of a model's download and load. `show` updates the progress.

    The end of the `with` block removes the bar, and prints a line with the size and speed of the download. The line is
    omitted if the download was very short.

    Args:
        name: name of the model.
        quiet: whether to show neither the bar nor the final line.
        stream: stream to draw the bar on, by default stderr. The bar is drawn only if the stream is a terminal.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        name: str,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = printable(name)
        self._quiet = quiet
        self._stream = stream or sys.stderr
        forbidden = any(os.environ.get(name, "").lower() in _YES for name in _FORBIDDING)
        self._draws = not quiet and not forbidden and self._stream.isatty()
        self._clock = clock
        self._started = clock()
        self._lock = threading.Lock()
        self._at = ("list", 0, 0)
        self._cached_bytes: int | None = None
        self._fetched = 0
        self._fetched_at = self._started
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        # Show the bar also if the hub does not answer and no progress arrives.
        self._late = threading.Timer(PROGRESS_DELAY_SECONDS, self._draw)
        self._late.daemon = True

    def __enter__(self) -> Self:
        if self._draws:
            self._late.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._late.cancel()
        with self._lock:
            self._draws = False
            if self._bar is not None:
                self._bar.stop()
        seconds = self._fetched_at - self._started
        if kind is None and self._fetched and seconds >= PROGRESS_DELAY_SECONDS and not self._quiet:
            rate = size_text(int(self._fetched / seconds))
            note(f"{self._name}: fetched {size_text(self._fetched)} in {seconds:.1f} s, {rate}/s")

    def show(self, stage: str, done: int, total: int) -> None:
        """Update the progress.

        Args:
            stage: what is being done, for example `download`.
            done: bytes done in this stage.
            total: total bytes of this stage, or 0 if unknown.
        """
        self._at = (stage, done, total)
        if stage == "download":
            if self._cached_bytes is None:
                self._cached_bytes = done
            self._fetched = max(self._fetched, done - self._cached_bytes)
            self._fetched_at = self._clock()
        self._draw()

    def _draw(self) -> None:
        with self._lock:
            if not self._draws or self._clock() - self._started < PROGRESS_DELAY_SECONDS:
                return
            stage, done, total = self._at
            text = f"{_DOING.get(stage, 'loading')} {self._name}"
            if self._bar is None:
                self._bar = _bar(self._stream)
                self._task = self._bar.add_task(text, total=total or None, completed=done)
                self._bar.start()
            elif self._task is not None:
                self._bar.update(self._task, description=text, total=total or None, completed=done)


def _bar(stream: TextIO) -> "Progress":
    """Return a progress bar that takes one line of the terminal. Columns that do not fit are omitted."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeRemainingColumn, TransferSpeedColumn
    from rich.table import Column
    from rich.text import Text

    class Description(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(task.description, no_wrap=True, overflow="ellipsis")

    class Bytes(ProgressColumn):
        def render(self, task: Task) -> Text:
            done = size_text(int(task.completed)) if task.completed else ""
            return Text(done if task.total is None else f"{done or 0} of {size_text(int(task.total))}")

    console = Console(file=stream)
    columns: list[ProgressColumn] = [Description(Column(no_wrap=True, ratio=1))]
    if console.width >= _WIDTH_OF_BAR:
        columns.append(BarColumn(bar_width=20, table_column=Column(no_wrap=True)))
    columns.append(Bytes(Column(no_wrap=True)))
    if console.width >= _WIDTH_OF_ALL:
        columns += [TransferSpeedColumn(Column(no_wrap=True)), TimeRemainingColumn(table_column=Column(no_wrap=True))]
    return Progress(*columns, console=console, transient=True, expand=True)
