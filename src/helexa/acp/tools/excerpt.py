"""Shortens text for display and for the model."""

import re
import unicodedata

_JOINER = "\u200d"
_HARMLESS = frozenset({_JOINER, "\u200c", "\u00a0", "\u3000"})  # characters that `printable` does not replace
# Invisible characters for which `isprintable` is True: fillers, variation selectors, and the empty Braille pattern.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def printable(text: str) -> str:
    """Return the text with escape sequences in place of unprintable characters."""
    # Spaces of other widths and the joiners of emoji and scripts are harmless.
    return "".join(
        character if character.isprintable() or character in _HARMLESS else _escaped(character) for character in text
    )


def shown_whole(text: str) -> str:
    """Return the whole text with escape sequences in place of invisible characters."""
    # Unlike `printable`, this function also replaces joiners, variation selectors, fillers, and all spaces but U+0020.
    # The user decides from the shown text whether a call may run, so no character may be hidden.
    return "".join(
        character
        if character in "\n\t" or (character.isprintable() and not _INVISIBLE.match(character))
        else _escaped(character)
        for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def title(text: str, width: int = 60) -> str:
    """Return a title for a text: one line of at most `width` characters."""
    line = printable(" ".join(text.split()))
    if len(line) <= width:
        return line
    end = width - 1
    while end > 0 and (_extends(line[end]) or line[end - 1] == _JOINER):
        end -= 1
    return line[: end or width - 1].rstrip() + "…"


def _extends(character: str) -> bool:
    """Return whether the character combines with its predecessor, like an accent."""
    return (
        character == _JOINER
        or unicodedata.category(character).startswith("M")
        or "\U0001f3fb" <= character <= "\U0001f3ff"
    )


def clipped(text: str, max_bytes: int) -> str:
    """Return the first `max_bytes` bytes of a text.

    If bytes are omitted, a note with their number follows.
    """
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    return f"{data[:max_bytes].decode(errors='ignore')}\n[{len(data) - max_bytes} more bytes are left out]"


def ends(text: str, max_bytes: int) -> str:
    """Return an excerpt: the start and end of a text, with a note on the middle.

    Beginning and end together have at most `max_bytes` bytes in UTF-8. If the text fits, return it unchanged.
    """
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    head, tail = data[: max_bytes // 3], data[-(max_bytes - max_bytes // 3) :]
    note = f"\n[{len(data) - max_bytes} bytes are left out here]\n"
    return head.decode(errors="ignore") + note + tail.decode(errors="ignore")


def fenced(text: str) -> str:
    """Return `text` as a Markdown code block whose fence does not occur in `text`."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text.rstrip()}\n{fence}"
