"""Find fixed strings in text that arrives piece by piece."""

import re
from collections.abc import Iterable


class Markers:
    """Finds the first of several marker strings. No marker may be a prefix of another marker.

    Attributes:
        strings: the marker strings.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self._whole = re.compile("|".join(map(re.escape, self.strings)) or r"(?!)")
        firsts = "".join(re.escape(string[0]) for string in self.strings)
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)")
        self._beginnings = frozenset(string[:end] for string in self.strings for end in range(1, len(string)))
        self._reach = max(map(len, self.strings), default=1) - 1

    def cannot_begin_in(self, text: str) -> bool:
        """Return whether no marker begins in `text`, regardless of the following text."""
        return self._first.search(text) is None

    def find(self, text: str, start: int, ended: bool) -> tuple[int, str | None]:
        """Return the position of the first marker from `start` on, and the marker.

        Without a marker, return the end of the text that cannot be part of a marker, and None. If `ended`, this is the
        end of `text`.
        """
        if found := self._whole.search(text, start):
            return found.start(), found.group()
        if not ended:
            position = max(start, len(text) - self._reach)
            while possible := self._first.search(text, position):
                if text[possible.start() :] in self._beginnings:
                    return possible.start(), None
                position = possible.end()
        return len(text), None

    def at(self, text: str, start: int, ended: bool) -> str | None:
        """Return the marker at position `start`; "" if there is none, None if more text is needed to decide."""
        if found := self._whole.match(text, start):
            return found.group()
        if not ended and (
            start == len(text) or (len(text) - start <= self._reach and text[start:] in self._beginnings)
        ):
            return None
        return ""
