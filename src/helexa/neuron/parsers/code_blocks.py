"""Find out whether a position in streamed Markdown text is inside code."""

import re

_FENCE = re.compile(r"[ \t>]*(`{3,})([^`\n]*)\Z")
_MAX_LINE = 200  # characters of a line that are kept; the beginning of a fence is at the beginning of a line


class CodeBlocks:
    """Tracks code blocks (between lines with three backticks) and code spans (between backticks) in streamed text.

    Attributes:
        fence: the backticks that began the current code block; "" outside of code blocks.
        has_content: whether the current code block contains text after its first line.
    """

    def __init__(self) -> None:
        self.fence = ""
        self.has_content = False
        self._line = ""  # the beginning of the current line
        self._backticks = 0  # number of runs of backticks in the current line
        self._in_run = False

    @property
    def in_span(self) -> bool:
        """Whether the position is inside a code span of the current line."""
        return not self.fence and self._backticks % 2 == 1

    @property
    def in_block(self) -> bool:
        """Whether the position is inside a code block."""
        return bool(self.fence)

    @property
    def begins_block(self) -> bool:
        """Whether the position is at the beginning of the content of a code block."""
        return self.in_block and not self.has_content and not self._line.strip()

    def feed(self, text: str) -> None:
        """Append text."""
        if "\n" not in text and "`" not in text:  # most tokens
            if text:
                self._in_run = False
                if len(self._line) < _MAX_LINE:
                    self._line += text[:_MAX_LINE]
            return
        *lines, last = text.split("\n")
        for line in lines:
            self._add(line)
            self._end_line()
        self._add(last)

    def _add(self, text: str) -> None:
        if len(self._line) < _MAX_LINE:
            self._line += text[: _MAX_LINE - len(self._line)]
        if "`" in text:
            for char in text:
                self._backticks += char == "`" and not self._in_run
                self._in_run = char == "`"
        elif text:
            self._in_run = False

    def _end_line(self) -> None:
        fence = _FENCE.match(self._line)
        if fence and not self.fence:
            self.fence, self.has_content = fence[1], False
        elif fence and len(fence[1]) >= len(self.fence) and not fence[2].strip():
            self.fence = ""
        elif self.fence:
            self.has_content |= bool(self._line.strip())
        self._line = ""
        self._backticks, self._in_run = 0, False
