"""An event loop whose clock stands still while anything can be done, and else jumps to when something is due.

Sockets are real. Unix sockets deliver what is written at once, so between two processes' worth of code in one loop
nothing takes any time but what a script says takes time: measurements are exact, on however busy a machine.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.time = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout is None or timeout <= 0:
            return ready or (super().select(None) if timeout is None else [])
        self.time += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """See above. Work in other threads is not waited for."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.time


@dataclass
class VirtualClock:
    """The loop's clock; the calendar jumps about as a badly set machine's does."""

    calendar: float = 1.7e12

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def calendar_ms(self) -> int:
        self.calendar -= 3_600_000
        return int(self.calendar)

    async def sleep_until(self, moment: float) -> None:
        await asyncio.sleep(max(moment - self.now(), 0))


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
