"""Buffer incoming text and provide the basic steps of incremental parsing."""

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
    """The text from the current position on is not a call of the family."""


class Source:
    """Buffer of the model's unread text.

    Parsers read from the front, and leave no more text unread than they need to detect an end. Text that was read is
    remembered until it is settled. If text turns out not to be a call, the parser returns the unsettled text as plain
    text.

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
        self._taken: list[str] = []

    @property
    def empty(self) -> bool:
        """Return whether the buffer has no unread text."""
        return self.at == len(self.text)

    @property
    def complete(self) -> bool:
        """Return whether the model's complete text has been read."""
        return self.empty and self.ended and not self.cut

    def feed(self, text: str) -> None:
        """Append the next piece of text."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self, end: int) -> str:
        """Read and return the text up to position `end`."""
        taken = self.text[self.at : end]
        self.at = end
        self._taken.append(taken)
        return taken

    def settle(self) -> None:
        """Forget the text read so far: it has been passed on."""
        self._taken.clear()

    @property
    def unsettled(self) -> str:
        """The text read since the last settlement."""
        return "".join(self._taken)

    def give_back(self) -> str:
        """Settle the text read since the last settlement and return it."""
        taken = self.unsettled
        self._taken.clear()
        return taken

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end."""
        while self.empty and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def space(self) -> Reading[None]:
        """Read all following white space."""
        while True:
            if not self.empty and (found := _SPACE.match(self.text, self.at)):
                self.take(found.end())
            if not self.empty or self.ended:
                return
            yield

    def name(self) -> Reading[str]:
        """Read a tool's name: letters, digits and `_.-:/`.

        Raises:
            NotACall: the name is empty or longer than `MAX_NAME`.
        """
        taken = ""
        while True:
            end = self.at
            while end < len(self.text) and (self.text[end].isalnum() or self.text[end] in "_.-:/"):
                end += 1
            taken += self.take(min(end, self.at + MAX_NAME + 1 - len(taken)))
            if len(taken) > MAX_NAME:
                raise NotACall
            if not self.empty or self.ended:
                break
            yield
        if not taken:
            raise NotACall
        return taken

    def short(self, ends: Markers, limit: int) -> Reading[tuple[str, str]]:
        """Read text up to a marker, which is left unread. Return the text and the marker, or "" if none is within
        `limit`.
        """
        taken = ""
        while True:
            end, found = ends.find(self.text, self.at, self.ended)
            taken += self.take(min(end, self.at + limit + 1 - len(taken)))
            if len(taken) > limit:
                return taken, ""
            if found is not None or self.ended:
                return taken, found or ""
            yield

    def key(self, end: str) -> Reading[str]:
        """Read a parameter's name, any text without line breaks, and the string `end` after the name.

        Raises:
            NotACall: the name is empty or longer than `MAX_NAME`.
        """
        taken, found = yield from self.short(Markers([end, "\n"]), MAX_NAME)
        if not taken or found != end:
            raise NotACall
        self.take(self.at + len(end))
        return taken

    def marker(self, markers: Markers) -> Reading[str]:
        """Read the marker that comes next. Return the marker, or "" if other text comes next."""
        found = yield from self.upcoming(markers)
        if found:
            self.take(self.at + len(found))
        return found

    def upcoming(self, markers: Markers) -> Reading[str]:
        """Return the marker that comes next without reading it; "" if other text comes next."""
        while (found := markers.at(self.text, self.at, self.ended)) is None:
            yield
        return found

    def expect(self, markers: Markers) -> Reading[str]:
        """Read the marker that comes next.

        Raises:
            NotACall: none of the markers comes next.
        """
        if not (found := (yield from self.marker(markers))):
            raise NotACall
        return found

    def until(self, markers: Markers, sink: Callable[[str], None]) -> Reading[str]:
        """Read text into `sink`, up to a marker. Return the unread marker, or "" if the text ended first."""
        while True:
            end, found = markers.find(self.text, self.at, self.ended)
            if end > self.at:
                sink(self.take(end))
            if found is not None:
                return found
            if self.ended:
                return ""
            yield
