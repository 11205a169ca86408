"""Shortens text for display and for the model: titles of one line, and outputs without their middle."""

import re
import unicodedata

_JOINER = "\u200d"
_HARMLESS = frozenset({_JOINER, "\u200c", "\u00a0", "\u3000"})  # not printable for Python


def printable(text: str) -> str:
    """Return the text with control characters and other unprintable characters replaced by escape sequences."""
    return "".join(
        character if character.isprintable() or character in _HARMLESS else character.encode("unicode_escape").decode()
        for character in text
    )


def title(text: str, width: int = 60) -> str:
    """Return the text as one line of at most `width` characters. Combined characters are not split."""
    line = printable(" ".join(text.split()))
    if len(line) <= width:
        return line
    end = width - 1
    while end > 0 and (_extends(line[end]) or line[end - 1] == _JOINER):
        end -= 1
    return line[: end or width - 1].rstrip() + "…"


def _extends(character: str) -> bool:
    """Return whether the character combines with the character before it, for example an accent or a skin color."""
    return (
        character == _JOINER
        or unicodedata.category(character).startswith("M")
        or "\U0001f3fb" <= character <= "\U0001f3ff"
    )


def clipped(text: str, max_bytes: int) -> str:
    """Return the first `max_bytes` bytes of the text in UTF-8, followed by a note on how much is omitted.

    If the text fits, return it unchanged.
    """
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    return f"{data[:max_bytes].decode(errors='ignore')}\n[{len(data) - max_bytes} more bytes are left out]"


def ends(text: str, max_bytes: int) -> str:
    """Return the beginning and the end of a text, with a note between them on how much is omitted.

    Beginning and end together have at most `max_bytes` bytes in UTF-8. If the text fits, return it unchanged.
    """
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    head, tail = data[: max_bytes // 3], data[-(max_bytes - max_bytes // 3) :]
    note = f"\n[{len(data) - max_bytes} bytes are left out here]\n"
    return head.decode(errors="ignore") + note + tail.decode(errors="ignore")


def fenced(text: str) -> str:
    """Return the text as a Markdown code block. Its fence is longer than any fence in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text.rstrip()}\n{fence}"
