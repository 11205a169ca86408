"""A timer whose deadline is moved much more often than it expires."""

import asyncio
from collections.abc import Callable


class Alarm:
    """Calls a function at a deadline, unless the deadline is moved or cleared before.

    Moving the deadline later keeps the pending timer. The timer is set again when it fires too early, which costs less
    than resetting it with each move.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring: Callable[[], None] | None = ring
        self._at: float | None = None
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def set(self, secs: float) -> None:
        """Set the deadline to `secs` seconds from now. Replaces an earlier deadline."""
        self._at = at = self._loop.time() + secs
        if self._timer is None or at < self._due:
            self._cancel()
            self._wait(at)

    def clear(self) -> None:
        """Clear the deadline."""
        self._at = None

    def stop(self) -> None:
        """Disable the alarm and drop the function."""
        self._at = self._ring = None
        self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, at: float) -> None:
        self._due = at
        self._timer = self._loop.call_at(at, self._go_off)

    def _go_off(self) -> None:
        self._timer = None
        if self._at is None or self._ring is None:
            return
        if self._at > self._loop.time():
            self._wait(self._at)
        else:
            self._at = None
            self._ring()
