"""A timer for deadlines that are often postponed and seldom reached."""

import asyncio
from collections.abc import Callable


class DeadlineTimer:
    """Calls a function when a deadline is reached. Until then, the deadline can be changed or removed.

    If the deadline is postponed, the object keeps its current timer in the event loop. When that timer fires too early,
    the object starts a new timer. A new timer at each change of the deadline would be more expensive.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback: Callable[[], None] | None = callback
        self._deadline: float | None = None
        self._timer_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def set(self, secs: float) -> None:
        """Set the deadline to `secs` seconds from now. An earlier deadline is replaced."""
        self._deadline = deadline = self._loop.time() + secs
        if self._timer is None or deadline < self._timer_at:
            self._cancel()
            self._start_timer(deadline)

    def clear(self) -> None:
        """Remove the deadline, so that the function is not called until a new deadline is set."""
        self._deadline = None

    def stop(self) -> None:
        """Disable the object permanently, and release the reference to the function."""
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
