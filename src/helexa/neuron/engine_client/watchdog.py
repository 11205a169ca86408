"""Detects an engine that hangs."""


class HangDetector:
    """Detects a hang: an engine that has work but makes no progress during `patience` consecutive checks.

    The detector counts checks instead of seconds. If the server process itself was suspended, elapsed seconds would
    cause a false alarm.

    Args:
        patience: number of consecutive checks without progress after which an engine with work counts as hung.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._last_count = -1
        self._silent_checks = 0

    def check(self, news: int, working: bool) -> bool:
        """Record the result of one check, and return whether the engine hangs.

        Args:
            news: a counter that grows with each message from the engine and with the engine's progress count.
            working: whether the engine has work, so that progress is expected.
        """
        self._silent_checks = self._silent_checks + 1 if working and news == self._last_count else 0
        self._last_count = news
        return self._silent_checks >= self._patience
