"""Clocks of the benchmark: a monotonic clock to measure durations, and a calendar clock to date samples."""

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """A source of the current time. Tests can replace it."""

    def now(self) -> float:
        """Return the time in seconds on a monotonic clock with an arbitrary origin."""
        ...

    def calendar_ms(self) -> int:
        """Return the calendar time in UTC epoch milliseconds."""
        ...

    async def sleep_until(self, moment: float) -> None:
        """Wait until `now()` has reached `moment`. Return immediately if `moment` is in the past."""
        ...


@dataclass(frozen=True, slots=True)
class SystemClock:
    """The clocks of the operating system."""

    def now(self) -> float:
        """Return the time in seconds on a monotonic clock with an arbitrary origin."""
        return time.perf_counter()

    def calendar_ms(self) -> int:
        """Return the calendar time in UTC epoch milliseconds."""
        return time.time_ns() // 1_000_000

    async def sleep_until(self, moment: float) -> None:
        """Wait until `now()` has reached `moment`, within the accuracy of the event loop."""
        await asyncio.sleep(max(moment - self.now(), 0))
