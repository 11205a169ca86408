"""Builds the prompt of a command from an argument, files, and text that is piped to stdin."""

import sys
from collections.abc import Sequence
from pathlib import Path

from helexa.cli.failure import USAGE, CommandError
from helexa.cli.terminal import note

_MOST_CHARACTERS = 16 * 1024 * 1024


def prompt_text(prompt: str | None, files: Sequence[Path] = ()) -> str:
    """Return the prompt, followed by the contents of the files and the text that is piped to stdin.

    Raises:
        CommandError: the prompt is empty or too long, or a file cannot be read.
    """
    parts = [prompt or "", *map(_content, files)]
    if not sys.stdin.isatty():
        parts.append(_bounded(sys.stdin.read(_MOST_CHARACTERS + 1), "the text piped in"))
    elif prompt is None and not files:
        note("type the prompt; Ctrl-D on a line of its own ends it")
        parts.append(sys.stdin.read())
    text = "\n\n".join(part.strip("\r\n") for part in parts if part.strip())
    if not text:
        raise CommandError("nothing to ask: give a PROMPT or pipe in some text", USAGE)
    return text


def _content(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return _bounded(file.read(_MOST_CHARACTERS + 1), str(path))
    except UnicodeDecodeError:
        raise CommandError(f"{path}: is no text", USAGE) from None
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}", USAGE) from None


def _bounded(text: str, source: str) -> str:
    if len(text) > _MOST_CHARACTERS:
        raise CommandError(f"{source} is too long for any model")
    return text
