"""Clocks of the benchmark. The monotonic clock measures; calendar time only dates samples."""

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """A clock that coroutines can wait for."""

    def now(self) -> float:
        """Return monotonic seconds since an arbitrary moment."""
        ...

    def calendar_ms(self) -> int:
        """Return UTC epoch milliseconds."""
        ...

    async def sleep_until(self, moment: float) -> None:
        """Return when `now()` has reached `moment`, immediately for a past moment."""
        ...


@dataclass(frozen=True, slots=True)
class SystemClock:
    """The clocks of this machine."""

    def now(self) -> float:
        """Return monotonic seconds since an arbitrary moment."""
        return time.perf_counter()

    def calendar_ms(self) -> int:
        """Return UTC epoch milliseconds."""
        return time.time_ns() // 1_000_000

    async def sleep_until(self, moment: float) -> None:
        """Return when `now()` has reached `moment`, within the accuracy of the event loop."""
        await asyncio.sleep(max(moment - self.now(), 0))
