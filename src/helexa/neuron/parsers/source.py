"""Text that arrives piece by piece, and the steps in which parsers read it."""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from helexa.neuron.parsers.markers import Markers

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A parser at work: it yields where it needs more text."""

_SPACE = re.compile(r"\s*")
MAX_NAME = 128


class NotACall(Exception):
    """The text is none of the family's calls from here on."""


class Source:
    """What the model said and nobody has read yet.

    Readers take text from its front, and never leave more unread than they need to see the end of. What is taken is
    remembered until it is settled, so that a parser that took something for a call can give it back as text.

    Attributes:
        text: the piece at hand.
        at: how much of it is read.
        ended: no more will come.
        cut: because of a limit, not because it is complete.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.cut = False
        self._taken: list[str] = []

    @property
    def empty(self) -> bool:
        """Whether all that came is read."""
        return self.at == len(self.text)

    @property
    def complete(self) -> bool:
        """Whether all is read that the model had to say."""
        return self.empty and self.ended and not self.cut

    def feed(self, text: str) -> None:
        """Add the next piece."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self, end: int) -> str:
        """Read the text at hand up to `end`."""
        taken = self.text[self.at : end]
        self.at = end
        self._taken.append(taken)
        return taken

    def settle(self) -> None:
        """What was taken so far is passed on in some form."""
        self._taken.clear()

    @property
    def unsettled(self) -> str:
        """What was taken since it was last settled."""
        return "".join(self._taken)

    def give_back(self) -> str:
        """What was taken since it was last settled, which settles it."""
        taken = self.unsettled
        self._taken.clear()
        return taken

    def peek(self) -> Reading[str]:
        """The next character, left unread; "" at the end."""
        while self.empty and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def space(self) -> Reading[None]:
        """Take white space, as far as it goes."""
        while True:
            if not self.empty and (found := _SPACE.match(self.text, self.at)):
                self.take(found.end())
            if not self.empty or self.ended:
                return
            yield

    def name(self) -> Reading[str]:
        """Take a tool's name: letters, digits and `_.-:/`.

        Raises:
            NotACall: there is none, or one too long to be one.
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
        """Take text up to a marker, which is left unread; both, and "" for the marker if none comes within `limit`."""
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
        """Take a parameter's name, which may be any in one line, and what `end`s it.

        Raises:
            NotACall: there is none, or one too long to be one.
        """
        taken, found = yield from self.short(Markers([end, "\n"]), MAX_NAME)
        if not taken or found != end:
            raise NotACall
        self.take(self.at + len(end))
        return taken

    def marker(self, markers: Markers) -> Reading[str]:
        """Take the marker that comes next; "" if none of them does."""
        found = yield from self.upcoming(markers)
        if found:
            self.take(self.at + len(found))
        return found

    def upcoming(self, markers: Markers) -> Reading[str]:
        """The marker that comes next, left unread; "" if none of them does."""
        while (found := markers.at(self.text, self.at, self.ended)) is None:
            yield
        return found

    def expect(self, markers: Markers) -> Reading[str]:
        """Take the marker that comes next.

        Raises:
            NotACall: none of them does.
        """
        if not (found := (yield from self.marker(markers))):
            raise NotACall
        return found

    def until(self, markers: Markers, sink: Callable[[str], None]) -> Reading[str]:
        """Take text into `sink`, as it comes, up to a marker, which is left unread; "" if the text ended first."""
        while True:
            end, found = markers.find(self.text, self.at, self.ended)
            if end > self.at:
                sink(self.take(end))
            if found is not None:
                return found
            if self.ended:
                return ""
            yield
