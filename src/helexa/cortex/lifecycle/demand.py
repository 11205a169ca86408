"""The requests that wait for one model."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Protocol

from helexa.core.errors import overloaded
from helexa.cortex.lifecycle.load_job import LoadJob
from helexa.cortex.lifecycle.placement import Hold
from helexa.cortex.routing.router import Warm

MAX_WAITERS = 256
RETRY_CROWDED = 5


class Waiting(Protocol):
    """A request that waits."""

    @property
    def priority(self) -> int:
        """More is sooner."""
        ...

    @property
    def enqueued(self) -> float:
        """When it came (seconds of the fleet's clock)."""
        ...


class Demand:
    """A wanted model and its waiters.

    Attributes:
        outcome: where it serves in the end, or the refusal.
        job: the load that runs for it.
        hold: what it waits for while none does.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.outcome: asyncio.Future[Warm] = asyncio.get_running_loop().create_future()
        self.job: LoadJob | None = None
        self.hold: Hold | None = None
        self._waiters: list[Waiting] = []

    @property
    def since(self) -> float:
        """When the oldest waiter came."""
        return min((one.enqueued for one in self._waiters), default=inf)

    @property
    def priority(self) -> int:
        """The highest of the waiters'."""
        return max((one.priority for one in self._waiters), default=0)

    def wanted(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiters)

    @contextmanager
    def waiting(self, one: Waiting) -> Iterator[None]:
        """Count a request as waiting for as long as the block runs.

        Raises:
            ApiError: too many do.
        """
        if len(self._waiters) >= MAX_WAITERS:
            raise overloaded(f"too many requests wait for model '{self.model}' to load", RETRY_CROWDED)
        self._waiters.append(one)
        try:
            yield
        finally:
            self._waiters.remove(one)
