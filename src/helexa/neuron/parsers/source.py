"""Buffer incoming text and provide the basic operations of incremental parsers."""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from helexa.neuron.parsers.markers import Markers

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A parser coroutine: it yields when it needs more text."""

_SPACE = re.compile(r"\s*")
MAX_NAME = 128


class NotACall(Exception):
    """The text at the current position is not a call in the expected format."""


class Source:
    """Buffer of the model's unread text.

    Parsers read the text from the front and leave only the text unread that may be the beginning of a marker. Text that
    was read is unsettled until a parser has reported it and calls `settle`. If the text turns out not to be a call,
    `give_back` returns the unsettled text, which is then plain text.

    Attributes:
        text: the buffered text.
        at: position of the first unread character in `text`.
        ended: no more text will arrive.
        cut: the text ended because of a limit and is incomplete.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.cut = False
        self._unsettled: list[str] = []

    @property
    def empty(self) -> bool:
        """Whether the buffer has no unread text."""
        return self.at == len(self.text)

    @property
    def complete(self) -> bool:
        """Whether the model's text ended without being cut off, and all of it has been read."""
        return self.empty and self.ended and not self.cut

    def feed(self, text: str) -> None:
        """Append the next piece of text."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self, end: int) -> str:
        """Read the text up to position `end` of the buffer and return it."""
        text = self.text[self.at : end]
        self.at = end
        self._unsettled.append(text)
        return text

    def settle(self) -> None:
        """Forget the text read so far, because it has been reported."""
        self._unsettled.clear()

    @property
    def unsettled(self) -> str:
        """The text read since the last call of `settle`."""
        return "".join(self._unsettled)

    def give_back(self) -> str:
        """Return the unsettled text and settle it."""
        text = self.unsettled
        self._unsettled.clear()
        return text

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end."""
        while self.empty and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def space(self) -> Reading[None]:
        """Read all following white space."""
        while True:
            if not self.empty and (match := _SPACE.match(self.text, self.at)):
                self.take(match.end())
            if not self.empty or self.ended:
                return
            yield

    def name(self) -> Reading[str]:
        """Read a tool's name: letters, digits and `_.-:/`.

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
        """Read text up to a marker, which is left unread. Return the text and the marker.

        The marker is "" if none of `ends` occurs within `limit` characters.
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
        """Read a parameter's name, any text without line breaks, and the string `end` after it. Return the name.

        Raises:
            NotACall: the name is empty or longer than `MAX_NAME`.
        """
        text, marker_text = yield from self.short(Markers([end, "\n"]), MAX_NAME)
        if not text or marker_text != end:
            raise NotACall
        self.take(self.at + len(end))
        return text

    def marker(self, markers: Markers) -> Reading[str]:
        """Read the marker that comes next. Return the marker, or "" if other text comes next."""
        marker_text = yield from self.upcoming(markers)
        if marker_text:
            self.take(self.at + len(marker_text))
        return marker_text

    def upcoming(self, markers: Markers) -> Reading[str]:
        """Return the marker that comes next without reading it; "" if other text comes next."""
        while (marker_text := markers.at(self.text, self.at, self.ended)) is None:
            yield
        return marker_text

    def expect(self, markers: Markers) -> Reading[str]:
        """Read the marker that comes next.

        Raises:
            NotACall: none of the markers comes next.
        """
        if not (marker_text := (yield from self.marker(markers))):
            raise NotACall
        return marker_text

    def until(self, markers: Markers, sink: Callable[[str], None]) -> Reading[str]:
        """Read text into `sink`, up to a marker. Return the unread marker, or "" if the text ended first."""
        while True:
            end, marker_text = markers.find(self.text, self.at, self.ended)
            if end > self.at:
                sink(self.take(end))
            if marker_text is not None:
                return marker_text
            if self.ended:
                return ""
            yield
