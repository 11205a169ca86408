"""Decide when a crashed engine is restarted. The decision depends only on the times of earlier restarts."""

import math
from collections import deque

_CALM_SECONDS = 30.0
_LONGEST_PAUSE_SECONDS = 30.0


class Restarts:
    """Counts a model's restarts and limits them, to stop crash loops.

    Args:
        most: largest number of restarts within `window`.
        window: length of the time window, in seconds.
    """

    def __init__(self, most: int, window: float) -> None:
        self.most = most
        self.window = window
        self._times: deque[float] = deque(maxlen=max(most, 1))
        self._begun = -math.inf  # time at which the last restart was due
        self._quick = 0  # consecutive crashes shortly after a restart

    def next(self, now: float) -> float | None:
        """Count a restart at time `now` and return the seconds to wait before it; None if there were too many restarts.

        If the last engine ran for at least `_CALM_SECONDS`, the wait is 0. After quick crashes, the wait doubles each
        time, up to `_LONGEST_PAUSE_SECONDS`.
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
