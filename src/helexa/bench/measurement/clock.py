"""Time as the bench sees it. Only the monotonic clock measures; the calendar says when a sample was taken."""

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """A clock that can be waited for."""

    def now(self) -> float:
        """Seconds, monotonic, since some moment."""
        ...

    def calendar_ms(self) -> int:
        """UTC epoch milliseconds."""
        ...

    async def sleep_until(self, moment: float) -> None:
        """Return when `now()` has reached the moment; at once when it has passed."""
        ...


@dataclass(frozen=True, slots=True)
class SystemClock:
    """The machine's."""

    def now(self) -> float:
        """Seconds, monotonic, since some moment."""
        return time.perf_counter()

    def calendar_ms(self) -> int:
        """UTC epoch milliseconds."""
        return time.time_ns() // 1_000_000

    async def sleep_until(self, moment: float) -> None:
        """Return when `now()` has reached the moment, give or take the event loop; at once when it has passed."""
        await asyncio.sleep(max(moment - self.now(), 0))
