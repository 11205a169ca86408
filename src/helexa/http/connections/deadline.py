"""A timer whose deadline is moved much more often than it expires."""

import asyncio
from collections.abc import Callable


class Alarm:
    """Calls a function once at a deadline, which can be moved or cleared before.

    Moving the deadline later keeps the pending timer. When the timer fires too early, it is set again. This costs less
    than setting a new timer with each move.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback: Callable[[], None] | None = callback
        self._deadline: float | None = None
        self._timer_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def set(self, secs: float) -> None:
        """Set the deadline to `secs` seconds from now. Replaces an earlier deadline."""
        self._deadline = deadline = self._loop.time() + secs
        if self._timer is None or deadline < self._timer_at:
            self._cancel()
            self._start_timer(deadline)

    def clear(self) -> None:
        """Clear the deadline."""
        self._deadline = None

    def stop(self) -> None:
        """Disable the alarm and drop the function."""
        self._deadline = self._callback = None
        self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self, deadline: float) -> None:
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self._deadline is None or self._callback is None:
            return
        if self._deadline > self._loop.time():
            self._start_timer(self._deadline)
        else:
            self._deadline = None
            self._callback()
