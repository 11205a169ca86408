"""Detects an engine that hangs."""


class HangDetector:
    """Detects a hang: a number of consecutive checks at which an engine with work made no progress.

    Counting checks instead of seconds avoids a false alarm after the server process itself was suspended.

    Args:
        patience: number of consecutive checks without progress at which an engine with work counts as hung.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._last_count = -1
        self._silent_checks = 0

    def check(self, news: int, working: bool) -> bool:
        """Record the result of one check; return whether the engine hangs.

        Args:
            news: a counter that grows with each report and each progress of the engine.
            working: whether the engine has work.
        """
        self._silent_checks = self._silent_checks + 1 if working and news == self._last_count else 0
        self._last_count = news
        return self._silent_checks >= self._patience
