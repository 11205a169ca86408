"""Find fixed strings in streamed text."""

import re
from collections.abc import Iterable


class Markers:
    """A set of strings, called markers, to find in streamed text. No marker may be a prefix of another marker.

    Attributes:
        strings: the markers.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self._pattern = re.compile("|".join(map(re.escape, self.strings)) or r"(?!)")
        firsts = "".join(re.escape(string[0]) for string in self.strings)
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)")
        self._prefixes = frozenset(string[:end] for string in self.strings for end in range(1, len(string)))
        self._max_prefix = max(map(len, self.strings), default=1) - 1

    def cannot_begin_in(self, text: str) -> bool:
        """Return True if no marker begins in `text`, because `text` contains no first character of a marker."""
        return self._first.search(text) is None

    def find(self, text: str, start: int, ended: bool) -> tuple[int, str | None]:
        """Find the first marker in `text` at or after position `start`. Return its position and the marker.

        If `text` contains no marker but ends with the beginning of a marker, return the position of this beginning, and
        None. Otherwise, return the length of `text`, and None.

        Args:
            text: text to search.
            start: position at which the search starts.
            ended: whether no more text follows. If so, the beginning of a marker at the end of `text` is ignored.
        """
        if match := self._pattern.search(text, start):
            return match.start(), match.group()
        if not ended:
            position = max(start, len(text) - self._max_prefix)
            while possible := self._first.search(text, position):
                if text[possible.start() :] in self._prefixes:
                    return possible.start(), None
                position = possible.end()
        return len(text), None

    def at(self, text: str, start: int, ended: bool) -> str | None:
        """Return the marker at position `start` of `text`, or "" if there is no marker at this position.

        Return None if more text is needed to decide.

        Args:
            text: text that was received so far.
            start: position in `text`.
            ended: whether no more text follows.
        """
        if match := self._pattern.match(text, start):
            return match.group()
        if not ended and (
            start == len(text) or (len(text) - start <= self._max_prefix and text[start:] in self._prefixes)
        ):
            return None
        return ""


NO_MARKERS = Markers(())
"""The empty set of markers."""
