"""Fixed strings looked for in text that arrives piece by piece."""

import re
from collections.abc import Iterable


class Markers:
    """Finds the first of some strings. None of them may begin with another one.

    Attributes:
        strings: what is looked for.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self._whole = re.compile("|".join(map(re.escape, self.strings)) or r"(?!)")
        firsts = "".join(re.escape(string[0]) for string in self.strings)
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)")
        self._beginnings = frozenset(string[:end] for string in self.strings for end in range(1, len(string)))
        self._reach = max(map(len, self.strings), default=1) - 1

    def cannot_begin_in(self, text: str) -> bool:
        """Whether no marker begins in `text`, whatever follows."""
        return self._first.search(text) is None

    def find(self, text: str, start: int, ended: bool) -> tuple[int, str | None]:
        """Where the first marker from `start` on begins, and that marker.

        Without one, the place up to which the text cannot be part of a marker: its end, if it has `ended`.
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
        """The marker that the text at `start` begins with; "" if it begins with none, None if that is still open."""
        if found := self._whole.match(text, start):
            return found.group()
        if not ended and (
            start == len(text) or (len(text) - start <= self._reach and text[start:] in self._beginnings)
        ):
            return None
        return ""
