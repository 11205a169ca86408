"""When an engine that died may be started anew: pure decisions on times."""

import math
from collections import deque

_CALM_SECONDS = 30.0
_LONGEST_PAUSE_SECONDS = 30.0


class Restarts:
    """Counts a model's restarts, so that one that keeps dying does not flap for ever.

    Args:
        most: restarts within `window` seconds; one more is refused.
    """

    def __init__(self, most: int, window: float) -> None:
        self.most = most
        self.window = window
        self._times: deque[float] = deque(maxlen=max(most, 1))
        self._begun = -math.inf  # when the last one was to begin
        self._quick = 0  # deaths in a row of engines that did not live long

    def next(self, now: float) -> float | None:
        """Seconds to wait before the next restart, which is counted; None if there were too many.

        An engine that has lived for a while is replaced at once; after others the pauses become ever longer.
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
