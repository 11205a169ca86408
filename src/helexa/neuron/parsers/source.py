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

    Parsers read the text in order. They wait with text that may be the beginning of a marker until more text arrives.

    Text that a parser has read is unsettled. The parser calls `settle` when it has reported the text as events. If the
    text turns out not to be a call, `give_back` returns the unsettled text, to be reported as plain text.

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
        """Whether the model ended its output by itself, not because of a limit, and all text has been read."""
        return self.empty and self.ended and not self.cut

    def feed(self, text: str) -> None:
        """Append the next piece of text."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self, end: int) -> str:
        """Read the unread text up to position `end` of the buffer, and return it."""
        text = self.text[self.at : end]
        self.at = end
        self._unsettled.append(text)
        return text

    def settle(self) -> None:
        """Mark the text read so far as settled, because a parser has reported it, and drop it from the buffer."""
        self._unsettled.clear()

    @property
    def unsettled(self) -> str:
        """The text read since the last call of `settle`."""
        return "".join(self._unsettled)

    def give_back(self) -> str:
        """Return the text read since the last call of `settle`, and settle it."""
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
        """Read text up to one of the markers `ends`, which is left unread. Return the text and the marker.

        Return "" as the marker if none of `ends` occurs within `limit` characters.
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
        """Read a parameter's name and the string `end` after it. Return the name, which may be any text without line
        breaks.

        Raises:
            NotACall: the name is empty or longer than `MAX_NAME`.
        """
        text, marker_text = yield from self.short(Markers([end, "\n"]), MAX_NAME)
        if not text or marker_text != end:
            raise NotACall
        self.take(self.at + len(end))
        return text

    def marker(self, markers: Markers) -> Reading[str]:
        """Read the marker at the current position and return it. If other text comes next, read nothing and return "".

        If other text comes next, read nothing and return "".
        """
        marker_text = yield from self.upcoming(markers)
        if marker_text:
            self.take(self.at + len(marker_text))
        return marker_text

    def upcoming(self, markers: Markers) -> Reading[str]:
        """Return the marker at the current position without reading it; "" if other text comes next."""
        while (marker_text := markers.at(self.text, self.at, self.ended)) is None:
            yield
        return marker_text

    def expect(self, markers: Markers) -> Reading[str]:
        """Read the marker at the current position and return it.

        Raises:
            NotACall: none of `markers` is at the current position.
        """
        if not (marker_text := (yield from self.marker(markers))):
            raise NotACall
        return marker_text

    def until(self, markers: Markers, sink: Callable[[str], None]) -> Reading[str]:
        """Read text up to a marker and pass it to `sink`. Return the marker, which is left unread.

        Return "" if the text ended before a marker.
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
