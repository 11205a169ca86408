"""Stop strings in streamed text."""

from collections.abc import Sequence


class StopStrings:
    """Filter that returns streamed text until a stop string appears, and holds back a possible beginning of one.

    If several stop strings match, the stop string that ends first wins, independent of how the text is split into
    pushes. The stop string itself is not returned. The filter holds back fewer characters than the longest stop string
    has.

    Args:
        stops: the stop strings; empty strings are ignored.

    Attributes:
        matched: the stop string that appeared; None until one appears.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._pending = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; return the text that cannot be part of a stop string, and whether a stop string was found.

        The text after a stop string is dropped and nothing is held back.
        """
        text = self._pending + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._pending = ""
            _, start, self.matched = min(matches)
            return text[:start], True
        cut = self._first_possible_start(text)
        self._pending = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """Return the text that is held back. Call this at the end of the stream."""
        pending, self._pending = self._pending, ""
        return pending

    def _first_possible_start(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)
