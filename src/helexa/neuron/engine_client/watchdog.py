"""Detects an engine that hangs."""

_EXPECTED_FACTOR = 10.0  # a step may take this many times as long as expected
_MIN_SECONDS = 5.0
_MAX_CHECK_SECONDS = 1.0
_CHECKS = 8  # minimum number of checks within the time that a working engine may take without progress


class HangDetector:
    """Detects a hang: an engine that has work but makes no progress. There are two limits:

    * The engine makes no progress for `max_seconds`.
    * During a step with a known expected duration, the engine makes no progress for ten times this duration, and at
      least 5 seconds. This limit counts only time in which all threads of the engine sleep. An engine that is slow,
      because it computes, waits for a core or reads its weights from a disk, is therefore not killed.

    The detector counts checks instead of seconds. If the server process itself was suspended, elapsed seconds would
    cause a false alarm.

    Args:
        max_seconds: seconds without progress after which an engine with work counts as hung.

    Attributes:
        check_seconds: seconds between two checks.
    """

    def __init__(self, max_seconds: float) -> None:
        self.check_seconds = min(max_seconds / _CHECKS, _MAX_CHECK_SECONDS)
        self._max_seconds = max_seconds
        self._last_count = -1
        self._silent_checks = 0
        self._idle_seconds = 0.0

    def is_silent(self, news: int, working: bool) -> bool:
        """Record the result of one check, and return whether the engine has work but made no progress.

        Args:
            news: a counter that grows with each message from the engine and with the engine's progress count.
            working: whether the engine has work, so that progress is expected.
        """
        silent = working and news == self._last_count
        self._last_count = news
        if not silent:
            self._silent_checks, self._idle_seconds = 0, 0.0
        return silent

    def hangs_after(self, expected_seconds: float, idle_seconds: float) -> float | None:
        """Record a check without progress. Return the exceeded limit, in seconds; None if the engine may still work.

        Args:
            expected_seconds: expected duration of the step in progress; 0 if unknown.
            idle_seconds: for how many seconds since the last check all threads of the engine slept (see `IdleTime`).
        """
        self._silent_checks += 1
        # The first check without progress may come right after progress.
        if (self._silent_checks - 1) * self.check_seconds >= self._max_seconds:
            return self._max_seconds
        if expected_seconds <= 0:
            self._idle_seconds = 0.0
            return None
        self._idle_seconds += idle_seconds
        limit = max(_EXPECTED_FACTOR * expected_seconds, _MIN_SECONDS)
        return limit if self._idle_seconds >= limit else None
