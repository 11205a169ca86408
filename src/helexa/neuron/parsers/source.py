"""Buffer the model's output and provide the basic operations of incremental parsers."""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from helexa.neuron.parsers.markers import Markers

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Type of a parser coroutine that returns T. The coroutine yields when it needs more text."""

_SPACE = re.compile(r"\s*")
MAX_NAME = 128


class NotACall(Exception):
    """The text at the current position is not a tool call in the expected format."""


class Source:
    """Buffer of the model's output that was not parsed yet.

    Parser methods are generators (`Reading`). A parser method yields if it needs more text, for example to decide
    whether a `<` is the beginning of a marker. The method continues after `feed` has added text to the buffer.

    The source remembers the text that a parser has read but not yet added to the response's `Output`. After adding the
    text, the parser calls `settle`. If the text turns out not to be a tool call, `give_back` returns the remembered
    text, and the caller adds this text as plain text.

    Attributes:
        text: the buffered text.
        at: position of the first unread character in `text`.
        ended: whether no more text will arrive.
        cut: whether the output ended because of a limit.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.cut = False
        self._unsettled: list[str] = []
        self._record: list[str] | None = None

    @property
    def empty(self) -> bool:
        """Whether the buffer has no unread text."""
        return self.at == len(self.text)

    @property
    def complete(self) -> bool:
        """Whether all text was read, and the model ended its output by itself and not because of a limit."""
        return self.empty and self.ended and not self.cut

    def feed(self, text: str) -> None:
        """Append the next chunk of the model's output."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self, end: int) -> str:
        """Read the unread text up to position `end` of the buffer, and return it."""
        text = self.text[self.at : end]
        self.at = end
        self._unsettled.append(text)
        if self._record is not None:
            self._record.append(text)
        return text

    def record(self) -> list[str]:
        """Return a list to which all text is appended that is read until the next call of `stop_record`."""
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
        """Return the text that was read since the last call of `settle` or `give_back`, and forget this text."""
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
        """Read the text before the next marker of `ends`. Return the text and the marker. The marker is not read.

        If no marker follows within `limit` characters, return the text read so far and "".
        """
        text = ""
        while True:
            end, marker_text = ends.find(self.text, self.at, self.ended)
            text += self.take(min(end, self.at + limit + 1 - len(text)))
            if len(text) > limit:
                return text, ""
            if marker_text is not None or self.ended:
                return text, marker_text or ""
            yield

    def key(self, end: str) -> Reading[str]:
        """Read a parameter's name and the string `end` after it. Return the name.

        The name can contain any characters except line breaks.

        Raises:
            NotACall: the name is empty or longer than `MAX_NAME`.
        """
        text, marker_text = yield from self.short(Markers([end, "\n"]), MAX_NAME)
        if not text or marker_text != end:
            raise NotACall
        self.take(self.at + len(end))
        return text

    def marker(self, markers: Markers) -> Reading[str]:
        """Read and return the marker at the current position, if it is one of `markers`.

        If other text is at the current position, read nothing and return "".
        """
        marker_text = yield from self.upcoming(markers)
        if marker_text:
            self.take(self.at + len(marker_text))
        return marker_text

    def upcoming(self, markers: Markers) -> Reading[str]:
        """Return the marker at the current position without reading it, or "" if it is not one of `markers`."""
        while (marker_text := markers.at(self.text, self.at, self.ended)) is None:
            yield
        return marker_text

    def expect(self, markers: Markers) -> Reading[str]:
        """Read and return the marker at the current position, which must be one of `markers`.

        Raises:
            NotACall: none of `markers` is at the current position.
        """
        if not (marker_text := (yield from self.marker(markers))):
            raise NotACall
        return marker_text

    def until(self, markers: Markers, sink: Callable[[str], None]) -> Reading[str]:
        """Read text up to one of `markers` and pass it to `sink` as it arrives. Return the marker, which is not read.

        If the output ends before a marker, return "".
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
