"""Read streamed text with coroutines, and find fixed strings (markers) in it."""

import re
from collections.abc import Callable, Generator, Iterable
from functools import cached_property
from typing import TypeVar

T = TypeVar("T")
# Type of a parser coroutine that returns T. The coroutine yields when it needs more text.
Reading = Generator[None, None, T]

_SPACE = re.compile(r"\s*")
MAX_NAME = 128


class Markers:
    """Strings to find in streamed text. No marker may be a prefix of another."""

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self._max_prefix = max(map(len, self.strings), default=1) - 1

    # Compiled at the first use: a server creates the markers of all formats at its start, and uses only few of them.
    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.strings)) or r"(?!)")

    @cached_property
    def _first(self) -> re.Pattern[str]:
        firsts = "".join(re.escape(string[0]) for string in self.strings)
        return re.compile(f"[{firsts}]" if firsts else r"(?!)")

    @cached_property
    def _prefixes(self) -> frozenset[str]:
        return frozenset(string[:end] for string in self.strings for end in range(1, len(string)))

    def cannot_begin_in(self, text: str) -> bool:
        """Return whether `text` has no first character of a marker."""
        return self._first.search(text) is None

    def find(self, text: str, start: int, ended: bool) -> tuple[int, str | None]:
        """Return position and text of the first marker in `text` from position `start`.

        Without a marker, return the position of a beginning of a marker at the end of `text`, or the length of `text`,
        and None. If the text has `ended`, such a beginning is no marker.
        """
        if match := self._pattern.search(text, start):
            return match.start(), match.group()
        if not ended:
            # A marker may begin in the last characters and end in the next chunk.
            position = max(start, len(text) - self._max_prefix)
            while possible := self._first.search(text, position):
                if text[possible.start() :] in self._prefixes:
                    return possible.start(), None
                position = possible.end()
        return len(text), None

    def at(self, text: str, start: int, ended: bool) -> str | None:
        """Return the marker at position `start` of `text`, or "".

        Return None if the text has not `ended` and more text is needed to decide.
        """
        if match := self._pattern.match(text, start):
            return match.group()
        if not ended and (
            start == len(text) or (len(text) - start <= self._max_prefix and text[start:] in self._prefixes)
        ):
            return None
        return ""


NO_MARKERS = Markers(())  # No markers at all


class NotACall(Exception):
    """The text at the current position is not a tool call in the expected format."""


class Source:
    """Buffer of the model's output that was not parsed yet.

    Parser methods are generators (`Reading`). A parser method yields if it needs more text, for example to decide
    whether a `<` is the beginning of a marker. The method continues after `feed` has added text to the buffer.

    The source remembers the text that a parser has read but not yet added to the response's `Output`. After adding the
    text, the parser calls `settle`. If the text turns out not to be a tool call, `give_back` returns the remembered
    text, and the caller adds this text as plain text.
    """

    def __init__(self) -> None:
        self.text = ""  # the buffered text
        self.at = 0  # position of the first unread character in `text`
        self.ended = False  # whether no more text will arrive
        self.cut = False  # whether the output ended because of a limit
        self._unsettled: list[str] = []
        self._record: list[str] | None = None

    @property
    def empty(self) -> bool:
        """Whether the buffer has no unread text."""
        return self.at == len(self.text)

    @property
    def complete(self) -> bool:
        """Whether all text was read, and the output did not end because of a limit."""
        return self.empty and self.ended and not self.cut

    def feed(self, text: str) -> None:
        """Append a chunk of output to the unread text, whose positions then begin at 0."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self, end: int) -> str:
        """Read the unread text up to position `end` of the buffer, and return it."""
        text = self.text[self.at : end]
        self.at = end
        # so that `give_back` can return the text if it is no call
        self._unsettled.append(text)
        if self._record is not None:
            self._record.append(text)
        return text

    def record(self) -> list[str]:
        """Return a list that collects all text that is read until `stop_record`."""
        self._record = []
        return self._record

    def stop_record(self) -> None:
        """Stop the recording that `record` has begun."""
        self._record = None

    def settle(self) -> None:
        """Forget the text read so far, because the parser has added it to the `Output`."""
        self._unsettled.clear()

    @property
    def unsettled(self) -> str:
        """The text that was read since the last call of `settle` or `give_back`."""
        return "".join(self._unsettled)

    def give_back(self) -> str:
        """Return and forget the unsettled text."""
        text = self.unsettled
        self._unsettled.clear()
        return text

    def peek(self) -> Reading[str]:
        """Return the next character without reading it, or "" at the end of the output."""
        while self.empty and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def space(self) -> Reading[None]:
        """Read the white space at the current position."""
        while True:
            if not self.empty and (match := _SPACE.match(self.text, self.at)):
                self.take(match.end())
            if not self.empty or self.ended:
                return
            yield

    def name(self) -> Reading[str]:
        """Read and return a tool's name, which consists of letters, digits and `_.-:/`.

        Raises:
            NotACall: the name is empty or longer than `MAX_NAME`.
        """
        text = ""
        while True:
            end = self.at
            while end < len(self.text) and (self.text[end].isalnum() or self.text[end] in "_.-:/"):
                end += 1
            text += self.take(min(end, self.at + MAX_NAME + 1 - len(text)))
            if len(text) > MAX_NAME:
                raise NotACall
            if not self.empty or self.ended:
                break
            yield
        if not text:
            raise NotACall
        return text

    def short(self, ends: Markers, limit: int) -> Reading[tuple[str, str]]:
        """Read text up to one of `ends`. Return the text and the unread marker.

        If no marker follows within `limit` characters, return the text read so far and "".
        """
        text = ""
        while True:
            end, marker_text = ends.find(self.text, self.at, self.ended)
            # One character more than the limit shows that the text is too long.
            text += self.take(min(end, self.at + limit + 1 - len(text)))
            if len(text) > limit:
                return text, ""
            if marker_text is not None or self.ended:
                return text, marker_text or ""
            yield

    def key(self, end: str) -> Reading[str]:
        """Read a parameter's name in one line and the string `end`. Return the name.

        Raises:
            NotACall: the name is empty or longer than `MAX_NAME`.
        """
        text, marker_text = yield from self.short(Markers([end, "\n"]), MAX_NAME)
        if not text or marker_text != end:
            raise NotACall
        self.take(self.at + len(end))
        return text

    def marker(self, markers: Markers) -> Reading[str]:
        """Read and return the marker at the current position; return "" without one."""
        marker_text = yield from self.upcoming(markers)
        if marker_text:
            self.take(self.at + len(marker_text))
        return marker_text

    def upcoming(self, markers: Markers) -> Reading[str]:
        """Return which of `markers` is at the current position, or "", without reading it."""
        while (marker_text := markers.at(self.text, self.at, self.ended)) is None:
            yield
        return marker_text

    def expect(self, markers: Markers) -> Reading[str]:
        """Read and return the marker at the current position, one of `markers`.

        Raises:
            NotACall: none of `markers` is at the current position.
        """
        if not (marker_text := (yield from self.marker(markers))):
            raise NotACall
        return marker_text

    def until(self, markers: Markers, sink: Callable[[str], None]) -> Reading[str]:
        """Pass text to `sink` as it arrives, up to one of `markers`. Return the marker.

        The marker is not read. If the output ends before a marker, return "".
        """
        while True:
            end, marker_text = markers.find(self.text, self.at, self.ended)
            if end > self.at:
                sink(self.take(end))
            if marker_text is not None:
                return marker_text
            if self.ended:
                return ""
            yield
