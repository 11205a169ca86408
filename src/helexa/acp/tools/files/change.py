"""A change of a file: text replacement, and diffs limited to a size that editors can show."""

from difflib import get_close_matches
from pathlib import Path

from helexa.acp.failure import ToolError
from helexa.acp.history import Diff
from helexa.acp.tools.excerpt import clipped

_MOST_BYTES = 128_000  # per side of a diff
_CONTEXT_LINES = 5
_COMPARED_LINES = 2000


def replaced(text: str, old: str, new: str) -> tuple[str, int]:
    """Replace the only occurrence of `old`; return the new text and the line where the replacement begins.

    The text keeps its line endings.

    Raises:
        ToolError: `old` is missing or occurs several times; the message helps to correct the call.
    """
    if not old:
        raise ToolError("old_text is empty; write_file makes a new file")
    if "\r\n" in text and "\r\n" not in old:
        old, new = old.replace("\n", "\r\n"), new.replace("\r\n", "\n").replace("\n", "\r\n")
    if old == new:
        raise ToolError("old_text and new_text are the same")
    match text.count(old):
        case 0:
            raise ToolError(f"old_text is not in the file{_nearest(text, old)}")
        case 1:
            return text.replace(old, new), text.count("\n", 0, text.index(old)) + 1
        case count:
            raise ToolError(f"old_text is {count} times in the file, at {_lines_of(text, old)}; give more lines around")


def shown(path: Path, old: str | None, new: str) -> Diff:
    """Return the change as a diff of the whole file, or of the changed part of a large file."""
    before, after = old or "", new
    if len(before) + len(after) > _MOST_BYTES:
        before, after = _changed_part(before, after)
    return Diff(str(path), None if old is None else clipped(before, _MOST_BYTES), clipped(after, _MOST_BYTES))


def _changed_part(old: str, new: str) -> tuple[str, str]:
    """Return both texts without their common first and last lines, except for a few lines of context."""
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    fewest = min(len(before), len(after))
    head = next((at for at in range(fewest) if before[at] != after[at]), fewest)
    tail = next((at for at in range(fewest - head) if before[-1 - at] != after[-1 - at]), fewest - head)
    start, end = max(0, head - _CONTEXT_LINES), max(0, tail - _CONTEXT_LINES)
    return "".join(before[start : len(before) - end]), "".join(after[start : len(after) - end])


def _lines_of(text: str, part: str) -> str:
    lines: list[int] = []
    at = text.find(part)
    while at >= 0 and len(lines) < 10:
        lines.append(text.count("\n", 0, at) + 1)
        at = text.find(part, at + len(part))
    return f"line {lines[0]}" if len(set(lines)) == 1 else "lines " + ", ".join(map(str, lines))


def _nearest(text: str, old: str) -> str:
    """Return a hint to text that equals `old` except for white space, or to the line most like its first line."""
    lines, wanted = text.splitlines(), [line.split() for line in old.splitlines()]
    for at in range(len(lines) - len(wanted) + 1):
        if all(line.split() == words for line, words in zip(lines[at:], wanted, strict=False)):
            there = "\n".join(lines[at : at + len(wanted)])
            return f"; but for white space it is at line {at + 1}:\n{clipped(there, 2000)}"
    first = next((line for line in old.splitlines() if line.strip()), "")
    near = get_close_matches(first, lines[:_COMPARED_LINES], n=1)
    return f"; the line most like its first is line {lines.index(near[0]) + 1}: {clipped(near[0], 200)}" if near else ""
