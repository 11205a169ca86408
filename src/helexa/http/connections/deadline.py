"""A deadline that is moved far more often than it is met."""

import asyncio
from collections.abc import Callable


class Alarm:
    """Rings once its time has come, unless that is moved or cleared before.

    A timer that goes off too early is set anew then, which costs less than to cancel and set one with every move.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring: Callable[[], None] | None = ring
        self._at: float | None = None
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def set(self, secs: float) -> None:
        """Ring in so many seconds, whatever was to be before."""
        self._at = at = self._loop.time() + secs
        if self._timer is None or at < self._due:
            self._cancel()
            self._wait(at)

    def clear(self) -> None:
        """Do not ring."""
        self._at = None

    def stop(self) -> None:
        """Never ring again, and forget who was to be rung."""
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
