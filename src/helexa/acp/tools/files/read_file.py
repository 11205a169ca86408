"""The tool `read_file`: read a text file or a part of it, or look at an image file."""

import base64
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from helexa.acp.history import Image, ToolKind
from helexa.acp.host.boundary import ResolvedPath
from helexa.acp.tools.builtin import Arguments, BuiltIn, as_block
from helexa.acp.tools.excerpt import clipped, title
from helexa.acp.tools.tool import Progress, ToolContext, ToolError, ToolOutcome

_MAX_LINES = 2000
_MAX_BYTES = 64_000
_MAX_IMAGE_BYTES = (5 << 20) * 3 // 4  # 5 MiB in base64, the limit of Anthropic's API
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".webp")


class _Arguments(Arguments):
    path: Annotated[str, Meta(description="The file; relative paths are below the working directory.")]
    line: Annotated[int, Meta(ge=1, description="The line to begin with, from 1.")] | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, description=f"How many lines, {_MAX_LINES} at most.")] | UnsetType = UNSET


class ReadFile(BuiltIn):
    """The tool `read_file`, which reads a text file or a part of it, or an image file."""

    name = "read_file"
    description = (
        "Read a text file. Of a long one only a part is given; go on with `line` and `limit`. "
        "Also shows PNG, JPEG, GIF and WebP images."
    )
    kind: ToolKind = "read"
    arguments = _Arguments

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title with the path of the file and the number of the first line to read."""
        start_note = f" from line {arguments['line']}" if "line" in arguments else ""
        return f"Read {title(arguments['path'])}{start_note}"

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Read the file, and return its text or the requested lines, or the image that it contains."""
        target = context.boundary.resolve(arguments["path"])
        if target.is_folder():
            raise ToolError(f"{arguments['path']} is a folder; list_dir shows what is in it")
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
            content += f"\n[lines {first} to {first + line_count - 1}; there are more]"
        return ToolOutcome(content, shown=shown)


async def _image(target: ResolvedPath, context: ToolContext) -> ToolOutcome:
    data = await context.host.read_bytes(target.real)
    name = context.boundary.brief(target.path)
    if len(data) > _MAX_IMAGE_BYTES:
        raise ToolError(f"{name} has {len(data)} bytes; the limit for images is {_MAX_IMAGE_BYTES}. Make it smaller")
    kind = _media_type(data)
    if kind is None:
        raise ToolError(f"{name} is not a PNG, JPEG, GIF or WebP image")
    image = Image(kind, base64.b64encode(data).decode())
    return ToolOutcome(f"[the image {name}, {len(data)} bytes]", shown=(image,), images=(image,))


def _media_type(data: bytes) -> str | None:
    """Return the media type of an image file from its first bytes, or None if the format is not supported."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def _lines_that_fit(lines: list[str]) -> tuple[str, int]:
    """Return as many of the first lines as fit in the size limit, joined as text, and the number of these lines.

    If the first line alone exceeds the limit, return the beginning of that line.
    """
    remaining_bytes, line_count = _MAX_BYTES, 0
    for line in lines:
        remaining_bytes -= len(line.encode(errors="replace")) + 1
        if remaining_bytes < 0 and line_count:
            break
        line_count += 1
        if remaining_bytes < 0:
            break
    return clipped("\n".join(lines[:line_count]), _MAX_BYTES), line_count
