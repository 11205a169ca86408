"""Find stop strings in streamed text."""

from collections.abc import Sequence


class StopStrings:
    """Cuts off the streamed text of one response before the first stop string.

    Text that may be the beginning of a stop string is held back until more text arrives. The held text is always
    shorter than the longest stop string. If several stop strings match, the text is cut off before the stop string that
    ends first. The result does not depend on the sizes of the chunks in which the text arrives.

    Args:
        stops: the stop strings. Empty strings are ignored.

    Attributes:
        matched: the stop string that was found in the text, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._pending = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add a chunk of text. Return the text that can be sent, and whether a stop string was found.

        The returned text contains no part of a stop string. If a stop string was found, the text after it is dropped.
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
        """Return the text that was held back. Call this method at the end of the stream."""
        pending, self._pending = self._pending, ""
        return pending

    def _first_possible_start(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)
