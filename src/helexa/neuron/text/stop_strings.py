"""Cut off streamed text before the first stop string."""

from collections.abc import Sequence


class StopStrings:
    """Cuts off a response's streamed text before the stop string that ends first.

    Text that may be the beginning of a stop string is held back until more text arrives. The result does not depend on
    the sizes of the chunks in which the text arrives. Empty stop strings are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None  # the stop string that was found in the text, or None
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._pending = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text. Return the text that can be sent, and whether a stop string was found."""
        text = self._pending + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._pending = ""
            _, start, self.matched = min(matches)  # of several stop strings, the one that ends first
            return text[:start], True
        cut = self._first_possible_start(text)
        self._pending = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """Return the text that was held back, at the end of the stream."""
        pending, self._pending = self._pending, ""
        return pending

    def _first_possible_start(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)
