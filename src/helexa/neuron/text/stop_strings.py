"""Stop strings in streamed text."""

from collections.abc import Sequence


class StopStrings:
    """Filter that passes text on until a stop string appears, and holds back a possible beginning of one.

    If several stop strings match, the first complete stop string wins, independent of how the text is split into
    pushes. The stop string itself is not passed on. The filter holds back at most one character less than the longest
    stop string.

    Args:
        stops: the stop strings; empty strings are ignored.

    Attributes:
        found: the stop string that appeared; None before.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; return the text that is safe to pass on, and whether a stop string was found.

        After a stop string, all further text is dropped and nothing is held back.
        """
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            _, start, self.found = min(found)
            return text[:start], True
        cut = self._first_possible_start(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _first_possible_start(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)
