"""What command line programs share: one-line errors, exit codes, hidden secrets."""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from cyclopts import App, CycloptsError

from helexa.core.display import printable
from helexa.core.errors import HelexaError, UsageError, missing_extra

VERSION_FLAGS = ("--version", "-V", "-v")
"""Options that print the version of a program."""

# Exit code of a command that Ctrl-C ended: 128 + SIGINT, as in shells.
INTERRUPTED = 130

_MAX_CHARS = 2000
_EXPECTED = (CycloptsError, HelexaError, ImportError, OSError)
_SHORTEST_SECRET = 4  # shorter secrets are not hidden, because they may be parts of other arguments


def run_program(
    name: str,
    run: Callable[[list[str]], int | None],
    *,
    usage_message: Callable[[CycloptsError], str] = str,
    exit_code: Callable[[HelexaError], int] = lambda error: error.exit_code,
    tracebacks: bool = False,
) -> NoReturn:
    """Run the command line of this process and exit. An error prints one line.

    With the argument `--debug`, the exception of a failing command is raised instead.

    Args:
        run: runs the command that its arguments name, and returns the exit code or None for 0; see `call`.
        usage_message: function that returns the text of an error for invalid arguments.
        exit_code: function that returns the exit code of a command that fails with this error.
        tracebacks: whether an unexpected error prints a traceback also without `--debug`.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    tokens, debug = _without_debug(sys.argv[1:])
    try:
        code = run(tokens) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe, as in `helexa ps | head -1`: discard further output, including the flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:
        if debug or (tracebacks and not isinstance(error, _EXPECTED)):
            raise
        match error:
            case CycloptsError():
                text, code = f"{usage_message(error)} See {name} --help.", UsageError.exit_code
            case HelexaError():
                text, code = str(error), exit_code(error)
            case ImportError() if lack := missing_extra(error):
                text, code = lack, 1
            case OSError():
                text, code = _file_error(error), 1
            case _:
                text, code = f"internal error: {type(error).__name__}: {error} (--debug shows where)", 1
        with contextlib.suppress(OSError):
            print(f"{name}: {printable(text)[:_MAX_CHARS]}", file=sys.stderr)
    sys.exit(code)


def _file_error(error: OSError) -> str:
    if error.strerror is None or error.filename is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"


def call(app: App, tokens: list[str]) -> Any:
    """Run the command of `app` that `tokens` name, and return its result.

    Raises:
        CycloptsError: the arguments are invalid.
    """
    return app(tokens, exit_on_error=False, print_error=False, result_action="return_value")


def _without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    remaining = [argument for argument in arguments[:end] if argument != "--debug"]
    return remaining + arguments[end:], len(remaining) < end


def hide_argument(secret: str) -> None:
    """Overwrite `secret` in the command line of this process with `x`, if possible."""
    text = secret.encode(errors="surrogateescape")
    if len(text) < _SHORTEST_SECRET:
        return
    # Other users of the machine can read command lines with `ps`.
    try:
        # Fields 48 and 49 of the file are the addresses of the start and the end of the command line. Field 2, the name
        # in parentheses, may contain blanks, so only the fields from 3 on are split.
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:  # noqa: PTH123 - `Path.open` has no unbuffered r+b
            memory.seek(start)
            arguments = memory.read(end - start)
            if arguments and arguments == Path("/proc/self/cmdline").read_bytes():
                memory.seek(start)
                memory.write(arguments.replace(text, b"x" * len(text)))
    except (OSError, ValueError, IndexError, OverflowError):
        return
