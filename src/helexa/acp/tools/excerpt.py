"""Text made short enough to show: a title on one line, a long output without its middle."""

import re
import unicodedata

_JOINER = "\u200d"
_HARMLESS = frozenset({_JOINER, "\u200c", "\u00a0", "\u3000"})  # Python does not call them printable


def printable(text: str) -> str:
    """The text without what would disturb a terminal, a list of lines or JSON: it is escaped instead."""
    return "".join(
        character if character.isprintable() or character in _HARMLESS else character.encode("unicode_escape").decode()
        for character in text
    )


def title(text: str, width: int = 60) -> str:
    """The text on one line of at most `width` characters; one that people see as a whole is never split."""
    line = printable(" ".join(text.split()))
    if len(line) <= width:
        return line
    end = width - 1
    while end > 0 and (_extends(line[end]) or line[end - 1] == _JOINER):
        end -= 1
    return line[: end or width - 1].rstrip() + "…"


def _extends(character: str) -> bool:
    """Whether it belongs to the character before it: an accent, a variation, a skin colour, a joiner."""
    return (
        character == _JOINER
        or unicodedata.category(character).startswith("M")
        or "\U0001f3fb" <= character <= "\U0001f3ff"
    )


def clipped(text: str, most: int) -> str:
    """The text's beginning, at most `most` bytes of UTF-8, with a word about what is left out."""
    data = text.encode(errors="replace")
    if len(data) <= most:
        return data.decode()
    return f"{data[:most].decode(errors='ignore')}\n[{len(data) - most} more bytes are left out]"


def ends(text: str, most: int) -> str:
    """The text's beginning and end, together at most `most` bytes of UTF-8, with a word about the middle."""
    data = text.encode(errors="replace")
    if len(data) <= most:
        return data.decode()
    head, tail = data[: most // 3], data[-(most - most // 3) :]
    left_out = f"\n[{len(data) - most} bytes are left out here]\n"
    return head.decode(errors="ignore") + left_out + tail.decode(errors="ignore")


def fenced(text: str) -> str:
    """The text as a block of code in Markdown, whatever is in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text.rstrip()}\n{fence}"
