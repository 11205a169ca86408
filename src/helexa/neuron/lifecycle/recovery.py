"""Decide whether and when a crashed engine is restarted. The decision depends on how often it crashed recently."""

import math
from collections import deque

_CALM_SECONDS = 30.0
_LONGEST_PAUSE_SECONDS = 30.0


class RestartLimiter:
    """Limits how often the engine of one model is restarted, to stop crash loops.

    Args:
        most: largest number of restarts within the last `window` seconds.
        window: length of the time window, in seconds.
    """

    def __init__(self, most: int, window: float) -> None:
        self.most = most
        self.window = window
        self._times: deque[float] = deque(maxlen=max(most, 1))
        self._begun = -math.inf  # time at which the last restart was due
        self._quick = 0  # consecutive crashes shortly after a restart

    def next(self, now: float) -> float | None:
        """Record a restart at time `now`, and return how many seconds to wait before it. None forbids the restart.

        The result is None after `most` restarts within the time window. Otherwise, the wait is 0 if the engine ran for
        at least `_CALM_SECONDS` before it crashed. If it crashes sooner several times in a row, the waits are 1 s, 2 s,
        4 s and so on, up to `_LONGEST_PAUSE_SECONDS`.
        """
        while self._times and now - self._times[0] > self.window:
            self._times.popleft()
        if len(self._times) >= self.most:
            return None
        self._quick = self._quick + 1 if now - self._begun < _CALM_SECONDS else 0
        pause = min(2.0 ** (self._quick - 1), _LONGEST_PAUSE_SECONDS) if self._quick else 0.0
        self._times.append(now)
        self._begun = now + pause
        return pause
