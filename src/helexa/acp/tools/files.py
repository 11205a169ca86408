"""Tools that read and change files: read_file, edit_file and write_file."""

import base64
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from helexa.acp.conversation_and_events import CardContent, Diff, Image, Location, Text, ToolKind
from helexa.acp.host import HostError, ToolError
from helexa.acp.tools.boundary_and_secrets import ResolvedPath
from helexa.acp.tools.excerpt import clipped, fenced, shown_whole, title
from helexa.acp.tools.tool_and_effects import (
    Act,
    Arguments,
    BuiltIn,
    Progress,
    ToolContext,
    ToolOutcome,
    Writes,
    as_block,
)

_MAX_DIFF_BYTES = 128_000  # maximum size of each of the two texts of a diff
_CONTEXT_LINES = 5
_COMPARED_LINES = 2000
_MAX_HIDDEN_LINES = 50
_MAX_NOTE_BYTES = 8000


def replaced(text: str, old: str, new: str) -> tuple[str, int]:
    """For edit_file: replace the only occurrence of `old` in a file's text by `new`.

    If `text` has CRLF line endings, `old` and `new` may have LF line endings. The result has CRLF.

    Returns:
        The new text, and the line number where the replacement begins, counted from 1.

    Raises:
        ToolError: `old` does not occur or occurs several times. The message helps the model to correct the call.
    """
    if not old:
        raise ToolError("old_text is empty; give the text to replace, or create a new file with write_file")
    if "\r\n" in text and "\r\n" not in old:
        old, new = old.replace("\n", "\r\n"), new.replace("\r\n", "\n").replace("\n", "\r\n")
    if old == new:
        raise ToolError("old_text and new_text are the same; write the changed text in new_text")
    match text.count(old):
        case 0:
            hint = _nearest(text, old)
            raise ToolError(f"old_text is not in the file; read the file again and copy the text exactly{hint}")
        case 1:
            return text.replace(old, new), text.count("\n", 0, text.index(old)) + 1
        case count:
            lines = _lines_of(text, old)
            raise ToolError(f"old_text occurs {count} times in the file, at {lines}; add lines around it to old_text")


def _change_diff(path: Path, old: str | None, new: str) -> Diff:
    """Return a diff of a file's old and new text, for display in the editor.

    If the file is large, the diff has only the changed lines and a few lines around them.
    """
    old_part, new_part = old or "", new
    if len(old_part) + len(new_part) > _MAX_DIFF_BYTES:
        old_part, new_part = _changed_part(old_part, new_part)
    return Diff(
        str(path), None if old is None else clipped(old_part, _MAX_DIFF_BYTES), clipped(new_part, _MAX_DIFF_BYTES)
    )


def _change_preview(path: Path, old: str | None, new: str) -> tuple[CardContent, ...]:
    """Return the preview of a change: the diff, after a warning if necessary.

    The warning lists the new lines that contain invisible characters.
    """
    old_lines = frozenset((old or "").split("\n"))
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(new.split("\n"), 1) if line not in old_lines]
    hidden = [f"line {number}: {visible}" for number, line in lines if (visible := shown_whole(line)) != line]
    if not hidden:
        return (_change_diff(path, old, new),)
    # The editor's diff does not show escape sequences and characters that change the direction of text. So list the
    # lines that contain such characters before the diff.
    note = "The new text contains invisible characters:\n" + "\n".join(hidden[:_MAX_HIDDEN_LINES])
    return (Text(fenced(clipped(note, _MAX_NOTE_BYTES))), _change_diff(path, old, new))


def _changed_part(old: str, new: str) -> tuple[str, str]:
    """Return the parts of `old` and `new` that differ, and a few lines around them."""
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
    """Return a hint with similar text, because the file does not contain `old`.

    The hint shows text that differs from `old` only in white space. If there is no such text, the hint shows the line
    that is most similar to the first line of `old`. If no line is similar, the hint is empty.
    """
    lines, wanted_words = text.splitlines(), [line.split() for line in old.splitlines()]
    for index in range(len(lines) - len(wanted_words) + 1):
        if all(line.split() == words for line, words in zip(lines[index:], wanted_words, strict=False)):
            actual = "\n".join(lines[index : index + len(wanted_words)])
            return f"; line {index + 1} differs only in white space:\n{clipped(actual, 2000)}"
    first = next((line for line in old.splitlines() if line.strip()), "")
    matches = get_close_matches(first, lines[:_COMPARED_LINES], n=1)
    return (
        f"; most similar to the first line of old_text is line {lines.index(matches[0]) + 1}: "
        f"{clipped(matches[0], 200)}"
        if matches
        else ""
    )


_MAX_LINES = 2000
_MAX_READ_BYTES = 64_000
_MAX_IMAGE_BYTES = (5 << 20) * 3 // 4  # 5 MiB in base64, the limit of Anthropic's API
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".webp")


class _ReadArguments(Arguments):
    path: Annotated[
        str, Meta(description="Path of the file, absolute or relative to the working directory. Example: `src/app.py`.")
    ]
    line: Annotated[int, Meta(ge=1, description="First line to read. The first line of a file is 1.")] | UnsetType = (
        UNSET
    )
    limit: Annotated[int, Meta(ge=1, description=f"Number of lines to read, at most {_MAX_LINES}.")] | UnsetType = UNSET


class ReadFile(BuiltIn):
    """The tool `read_file`, which reads a text file or a part of it, or an image file."""

    name = "read_file"
    description = (
        "Read a text file, or look at a PNG, JPEG, GIF or WebP image. If a file is long, you get its first part; "
        'read the next part with line. Example: {"path": "app.py", "line": 2001}'
    )
    kind: ToolKind = "read"
    arguments = _ReadArguments

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title with the path of the file and the first line to read."""
        start_note = f" from line {arguments['line']}" if "line" in arguments else ""
        return f"Read {title(arguments['path'])}{start_note}"

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Read the file. Return its text, the requested lines, or its image."""
        target = context.boundary.resolve(arguments["path"])
        if target.is_folder():
            raise ToolError(f"{arguments['path']} is a folder, not a file; list_dir lists its files")
        if target.path.suffix.lower() in _IMAGE_SUFFIXES:
            return await _image(target, context)
        first = arguments.get("line", 1)
        limit = min(arguments.get("limit", _MAX_LINES), _MAX_LINES)
        text = await context.host.read_text(target.path, line=arguments.get("line"), limit=limit + 1)
        lines = text.split("\n")
        if lines[-1] == "":
            lines.pop()
        if not lines:
            content = "[the file is empty]" if first == 1 else f"[the file has no line {first}]"
            return ToolOutcome(content)
        content, line_count = _lines_that_fit(lines[:limit])
        shown = as_block(content)
        if line_count < len(lines):
            content += (
                f"\n[lines {first} to {first + line_count - 1}; there are more: read from line {first + line_count}]"
            )
        return ToolOutcome(content, shown=shown)


async def _image(target: ResolvedPath, context: ToolContext) -> ToolOutcome:
    data = await context.host.read_bytes(target.real)
    name = context.boundary.brief(target.path)
    if len(data) > _MAX_IMAGE_BYTES:
        raise ToolError(
            f"{name} has {len(data)} bytes; the limit for images is {_MAX_IMAGE_BYTES}; scale the image down"
        )
    kind = _media_type(data)
    if kind is None:
        raise ToolError(f"{name} is not a PNG, JPEG, GIF or WebP image; inspect the file with a command")
    image = Image(kind, base64.b64encode(data).decode())
    return ToolOutcome(f"[the image {name}, {len(data)} bytes]", shown=(image,), images=(image,))


def _media_type(data: bytes) -> str | None:
    """Return the media type of an image by its first bytes, or None if unknown."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def _lines_that_fit(lines: list[str]) -> tuple[str, int]:
    """Return the first lines that fit in the size limit, and their number.

    If the first line alone exceeds the limit, return the beginning of that line.
    """
    remaining_bytes, line_count = _MAX_READ_BYTES, 0
    for line in lines:
        remaining_bytes -= len(line.encode(errors="replace")) + 1
        if remaining_bytes < 0 and line_count:
            break
        line_count += 1
        if remaining_bytes < 0:
            break
    return clipped("\n".join(lines[:line_count]), _MAX_READ_BYTES), line_count


class _ChangesFile(BuiltIn):
    """Base class of the tools that change one file."""

    kind: ToolKind = "edit"
    verb: str  # first word of the title of a call

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title with the path of the file."""
        return f"{self.verb} {title(arguments['path'])}"

    def act(self, arguments: dict[str, Any], context: ToolContext) -> Act:
        """Return the effect of the call: it changes one file (`Writes`)."""
        return Writes(context.boundary.resolve(arguments["path"]))

    def _file(self, arguments: dict[str, Any], context: ToolContext) -> ResolvedPath:
        target = context.boundary.resolve(arguments["path"])
        if target.is_folder():
            raise ToolError(f"{arguments['path']} is a folder, not a file; list_dir lists its files")
        return target


class _EditArguments(Arguments):
    path: Annotated[str, Meta(description="Path of the file. Example: `src/app.py`.")]
    old_text: Annotated[
        str,
        Meta(
            description="Text to replace, exactly as in the file. Must occur once. Copy it with all spaces and line "
            "breaks, and add lines around it until it is unique."
        ),
    ]
    new_text: Annotated[str, Meta(description="Text to insert in place of old_text. Empty to delete old_text.")]


class EditFile(_ChangesFile):
    """The tool `edit_file`, which replaces a part of a file's text."""

    name = "edit_file"
    description = (
        "Replace one piece of text in a file. Read the file first. "
        'Example: {"path": "app.py", "old_text": "port = 80\\n", "new_text": "port = 8080\\n"}'
    )
    verb = "Edit"
    arguments = _EditArguments

    async def preview(self, arguments: dict[str, Any], context: ToolContext) -> tuple[CardContent, ...]:
        """Return a diff of the file before and after the edit, for the permission request.

        If the file may contain secrets, the diff shows only the arguments `old_text` and `new_text`.
        """
        target = context.boundary.resolve(arguments["path"])
        if target.secret:
            # Show only the arguments and do not read the file: an error would tell the model, before the user has
            # answered, whether the file contains `old_text`.
            return _change_preview(target.path, arguments["old_text"], arguments["new_text"])
        old, new, _ = await self._change(arguments, context)
        return _change_preview(target.path, old, new)

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Replace the text in the file. Return a message and a diff."""
        path = context.boundary.resolve(arguments["path"]).path
        old, new, line = await self._change(arguments, context)
        await context.host.write_text(path, new)
        return ToolOutcome(
            f"edited {arguments['path']} at line {line}",
            shown=(_change_diff(path, old, new),),
            locations=(Location(str(path), line),),
        )

    async def _change(self, arguments: dict[str, Any], context: ToolContext) -> tuple[str, str, int]:
        old = await context.host.read_text(self._file(arguments, context).path)
        return old, *replaced(old, arguments["old_text"], arguments["new_text"])


class _WriteArguments(Arguments):
    path: Annotated[str, Meta(description="Path of the file. Missing folders are created. Example: `src/new.py`.")]
    content: Annotated[str, Meta(description="The complete text of the file.")]


class WriteFile(_ChangesFile):
    """The tool `write_file`, which creates or overwrites a file."""

    name = "write_file"
    description = (
        "Create a text file, or replace all of its text. To change a part of a file, use edit_file. "
        'Example: {"path": "hello.txt", "content": "Hello\\n"}'
    )
    verb = "Write"
    arguments = _WriteArguments

    async def preview(self, arguments: dict[str, Any], context: ToolContext) -> tuple[CardContent, ...]:
        """Return a diff of the file before and after the call, for the permission request."""
        target = self._file(arguments, context)
        return _change_preview(target.path, await self._old(target, context), arguments["content"])

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Write the file, and return a message for the model and a diff for the user."""
        target = self._file(arguments, context)
        diff = _change_diff(target.path, await self._old(target, context), arguments["content"])
        await context.host.write_text(target.path, arguments["content"])
        size = len(arguments["content"].encode())
        return ToolOutcome(f"wrote {arguments['path']} ({size} bytes)", shown=(diff,))

    async def _old(self, target: ResolvedPath, context: ToolContext) -> str | None:
        """Return the current text of the file, or None if it is missing or unreadable."""
        if not target.exists():
            return None
        try:
            return await context.host.read_text(target.path)
        except HostError:
            return None
