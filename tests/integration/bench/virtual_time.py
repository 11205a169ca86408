"""An event loop with a virtual clock.

The clock stands still while callbacks are ready to run, and otherwise jumps to the next timer. Sockets are real: Unix
sockets deliver data at once, so a client and a server in one loop spend only the time that a script prescribes.
Measurements are exact on a busy machine too.
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
    """An event loop in virtual time. The loop does not wait for work in other threads."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.time


@dataclass
class VirtualClock:
    """A clock of the event loop's time. Its wall clock goes back an hour at every call."""

    calendar: float = 1.7e12

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def calendar_ms(self) -> int:
        self.calendar -= 3_600_000
        return int(self.calendar)

    async def sleep_until(self, moment: float) -> None:
        await asyncio.sleep(max(moment - self.now(), 0))


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time and return its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
