"""Detects an engine that hangs."""


class HangDetector:
    """Counts consecutive checks at which a working engine has reported nothing new.

    Counting checks instead of seconds avoids a false alarm after the server process itself was suspended.

    Args:
        patience: number of consecutive checks without news, while there is work, at which the engine counts as hung.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._last_count = -1
        self._silent_checks = 0

    def check(self, news: int, working: bool) -> bool:
        """Check the engine; return whether it hangs.

        Args:
            news: a count that grows with each report or progress of the engine.
            working: whether the engine has work.
        """
        self._silent_checks = self._silent_checks + 1 if working and news == self._last_count else 0
        self._last_count = news
        return self._silent_checks >= self._patience
