"""Loads a model on a server or in a private engine, and shows the progress."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Self, TextIO

from helexa.cli.flags_and_completion import TargetFlags
from helexa.cli.terminal_output_and_errors import (
    MODEL_NOT_FOUND,
    PROGRESS_DELAY_SECONDS,
    CommandError,
    exit_code,
    note,
    printable,
)
from helexa.core.display import file_size_text
from helexa.core.errors import HelexaError, SourceError
from helexa.core.known_models import full_name, known_models, short_names
from helexa.core.model_source_ids import suggestion
from helexa.generation.model import Model
from helexa.generation.target import Target
from helexa.generation.target_choice import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from helexa.cli.gateway_client import Gateway


def choose_model(gateway: "Gateway", wanted: str | None, *, quiet: bool = False) -> str:
    """Return the name of the model to load or use on a gateway.

    The name is `wanted` if given (with a short name replaced by the full name), else the first loaded model in the
    gateway's list, else the first model in the list.

    If the model is not loaded yet, print a note, except if `quiet` is set.

    Raises:
        CommandError: the gateway does not list `wanted`, or lists no models.
    """
    models = {entry["id"]: bool(entry.get("loaded")) for entry in gateway.models()}
    if not models:
        raise CommandError(
            f"the gateway at {gateway.url} has no models; load one with `helexa load MODEL`", MODEL_NOT_FOUND
        )
    name = wanted or next((name for name, loaded in models.items() if loaded), next(iter(models)))
    name = name if name in models else full_name(name)
    if name not in models:
        hint = suggestion(name, models) or f"there are: {', '.join(sorted(models)[:20])}"
        raise CommandError(printable(f"model '{name}' not found; {hint}"), MODEL_NOT_FOUND)
    if not models[name] and not quiet:
        note(printable(f"{name} is not loaded yet: its first answer will take longer"))
    return name


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
    """A context manager that shows the progress of a model's download and load.

    The end of the `with` block removes the bar, and prints a line with the size and speed of the download. The line is
    omitted if the download took less than `PROGRESS_DELAY_SECONDS`, or the block raised an exception.

    Args:
        name: name of the model.
        quiet: whether to show neither the bar nor the final line.
        stream: stream to draw the bar on, by default stderr. The bar is drawn only if the stream is a terminal, and no
            variable of `_FORBIDDING` is set.
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
        # Draw the bar after the delay even if no call of `show` arrives, for example because the hub does not answer.
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
            rate = file_size_text(int(self._fetched / seconds))
            note(f"{self._name}: fetched {file_size_text(self._fetched)} in {seconds:.1f} s, {rate}/s")

    def show(self, stage: str, done: int, total: int) -> None:
        """Update the progress of the download or load.

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
    """Return a progress bar that takes one line of the terminal.

    Columns that do not fit are omitted.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeRemainingColumn, TransferSpeedColumn
    from rich.table import Column
    from rich.text import Text

    class Description(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(task.description, no_wrap=True, overflow="ellipsis")

    class Bytes(ProgressColumn):
        def render(self, task: Task) -> Text:
            done = file_size_text(int(task.completed)) if task.completed else ""
            return Text(done if task.total is None else f"{done or 0} of {file_size_text(int(task.total))}")

    console = Console(file=stream)
    columns: list[ProgressColumn] = [Description(Column(no_wrap=True, ratio=1))]
    if console.width >= _WIDTH_OF_BAR:
        columns.append(BarColumn(bar_width=20, table_column=Column(no_wrap=True)))
    columns.append(Bytes(Column(no_wrap=True)))
    if console.width >= _WIDTH_OF_ALL:
        columns += [TransferSpeedColumn(Column(no_wrap=True)), TimeRemainingColumn(table_column=Column(no_wrap=True))]
    return Progress(*columns, console=console, transient=True, expand=True)


_LIST = "`helexa models`"


def load_model(
    target_flags: TargetFlags, name: str | None, *, checked: bool = False, quiet: bool = False, verbose: bool = False
) -> tuple[Model, Target]:
    """Load a model, and return it with the server or private engine that runs it.

    Args:
        target_flags: command line options that select the server or private engine.
        name: model name, or None for the default model.
        checked: whether to reject a name that the server does not list. If False, the name is sent to the server,
            which may also accept names that it does not list.
        quiet: whether to show no progress.
        verbose: whether to print where the model runs.

    Raises:
        HelexaError: the model could not be downloaded or loaded. If the name is misspelled, the message suggests a
            known name.
    """
    location = target_flags.location(name)
    if location.url is not None and not location.is_private and (checked or location.wanted_model is None):
        from helexa.cli.gateway_client import Gateway  # an HTTP client, which is slow to import

        gateway = Gateway.from_environment(location.url)
        location = replace(location, model=choose_model(gateway, location.wanted_model, quiet=quiet))
    if verbose:
        _log_to_stderr()
    if location.model is not None and (full := full_name(location.model)) != location.model and not quiet:
        note(printable(f"{location.model} is {full}"))
    model = Model(location)
    try:
        with DownloadBar(location.wanted_model or DEFAULT_MODEL, quiet=quiet) as bar:
            target = model.open(bar.show)
    except SourceError as error:
        raise with_hint(error, location.wanted_model or "") from error
    if verbose:
        note(printable(f"{target.model}: {target.name}"))
    if target.slow_reason is not None and not quiet:
        note(printable(f"{target.model} runs slowly: {target.slow_reason}"))
    return model, target


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(printable(record.getMessage()))


def _log_to_stderr() -> None:
    """Print the library's log messages from level INFO on stderr."""
    log = logging.getLogger("helexa.generation")
    log.setLevel(logging.INFO)
    log.handlers = [_StderrHandler()]
    log.propagate = False


def with_hint(error: SourceError, name: str) -> HelexaError:
    """Return an error to raise instead of `error`, with advice on the model name.

    Return `error` itself if `name` is not its cause, or if there is no advice.
    """
    from helexa.cli.local_model import models_here
    from helexa.neuron.builtin_models import BUILTIN_MODELS

    about_name = ("invalid_source", "repo_refused", "repo_fetch_failed", "not_cached", "empty_repo")
    if error.kind not in about_name or _is_path(name):
        return error
    with suppress(HelexaError, OSError):
        known = dict.fromkeys([*BUILTIN_MODELS, *(model.name for model in models_here()), *short_names()])
        exists = name in known or any(name == model.name.partition(":")[0] for model in known_models())
        near = None if exists else suggestion(name, known)
        if error.kind == "invalid_source" and "/" not in name:
            text = f"model '{printable(name)}' not found; {near or f'write org/name, or a name of {_LIST}'}"
            return CommandError(text, MODEL_NOT_FOUND)
        return CommandError(f"{error}; {near}", exit_code(error)) if near else error
    return error


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~", "file:"))
