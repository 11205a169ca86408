"""Detects an engine that hangs."""


class HangDetector:
    """Detects a hang: an engine that has work but makes no progress during `max_silent_checks` consecutive checks.

    The detector counts checks instead of seconds. If the server process itself was suspended, elapsed seconds would
    cause a false alarm.

    Args:
        max_silent_checks: number of consecutive checks without progress after which an engine with work counts as hung.
    """

    def __init__(self, max_silent_checks: int) -> None:
        self._max_silent_checks = max_silent_checks
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
        return self._silent_checks >= self._max_silent_checks
