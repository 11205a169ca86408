"""Replaces text in a file's content, and creates diffs of a limited size."""

from difflib import get_close_matches
from pathlib import Path

from helexa.acp.failure import ToolError
from helexa.acp.history import Diff
from helexa.acp.tools.excerpt import clipped

_MAX_BYTES = 128_000  # per side of a diff
_CONTEXT_LINES = 5
_COMPARED_LINES = 2000


def replaced(text: str, old: str, new: str) -> tuple[str, int]:
    """Replace the only occurrence of `old` in `text` by `new`.

    If `text` has CRLF line endings, `old` and `new` may have LF line endings. The result has CRLF.

    Returns:
        The new text, and the line number where the replacement begins, counted from 1.

    Raises:
        ToolError: `old` does not occur or occurs several times. The message helps the model to correct the call.
    """
    if not old:
        raise ToolError("old_text is empty; write_file creates a new file")
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
            raise ToolError(
                f"old_text occurs {count} times in the file, at {_lines_of(text, old)}; add surrounding lines"
            )


def change_diff(path: Path, old: str | None, new: str) -> Diff:
    """Return a diff of a file's old and new text, for display in the editor.

    If the file is large, the diff has only the changed lines and a few lines around them.
    """
    old_part, new_part = old or "", new
    if len(old_part) + len(new_part) > _MAX_BYTES:
        old_part, new_part = _changed_part(old_part, new_part)
    return Diff(str(path), None if old is None else clipped(old_part, _MAX_BYTES), clipped(new_part, _MAX_BYTES))


def _changed_part(old: str, new: str) -> tuple[str, str]:
    """Return the part of `old` and the part of `new` that differ, and a few equal lines before and after each part."""
    old_part, new_part = old.splitlines(keepends=True), new.splitlines(keepends=True)
    common_lines = min(len(old_part), len(new_part))
    head = next((index for index in range(common_lines) if old_part[index] != new_part[index]), common_lines)
    tail = next(
        (index for index in range(common_lines - head) if old_part[-1 - index] != new_part[-1 - index]),
        common_lines - head,
    )
    start, end = max(0, head - _CONTEXT_LINES), max(0, tail - _CONTEXT_LINES)
    return "".join(old_part[start : len(old_part) - end]), "".join(new_part[start : len(new_part) - end])


def _lines_of(text: str, needle: str) -> str:
    lines: list[int] = []
    index = text.find(needle)
    while index >= 0 and len(lines) < 10:
        lines.append(text.count("\n", 0, index) + 1)
        index = text.find(needle, index + len(needle))
    return f"line {lines[0]}" if len(set(lines)) == 1 else "lines " + ", ".join(map(str, lines))


def _nearest(text: str, old: str) -> str:
    """Return a hint that shows the model similar text in the file, because the file does not contain `old`.

    The hint shows text that differs from `old` only in white space. If there is no such text, the hint shows the line
    that is most similar to the first line of `old`.
    """
    lines, wanted_words = text.splitlines(), [line.split() for line in old.splitlines()]
    for index in range(len(lines) - len(wanted_words) + 1):
        if all(line.split() == words for line, words in zip(lines[index:], wanted_words, strict=False)):
            actual = "\n".join(lines[index : index + len(wanted_words)])
            return f"; line {index + 1} differs only in white space:\n{clipped(actual, 2000)}"
    first = next((line for line in old.splitlines() if line.strip()), "")
    matches = get_close_matches(first, lines[:_COMPARED_LINES], n=1)
    return (
        f"; the line most similar to its first line is line {lines.index(matches[0]) + 1}: {clipped(matches[0], 200)}"
        if matches
        else ""
    )
