"""Stop strings in streamed text."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string appears in it, holding back what may be the beginning of one.

    Where several match, the one that is complete first counts, however the text is cut into pushes. Nothing of it is
    passed on. At most one character less than the longest stop string is held back.

    Args:
        stops: the stop strings; empty ones are ignored.

    Attributes:
        found: the stop string that appeared, None until then.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next text; return the text that is safe to pass on, and whether a stop string was found.

        After one was found the rest of the text is dropped and nothing is held back any more.
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
        """The text held back, once no more will come."""
        held, self._held = self._held, ""
        return held

    def _first_possible_start(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)
