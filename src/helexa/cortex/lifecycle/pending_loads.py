"""Queue of the requests that wait until a model is loaded."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Protocol

from helexa.core.errors import overloaded
from helexa.cortex.lifecycle.load_job import LoadJob
from helexa.cortex.lifecycle.placement import DelayedPlacement
from helexa.cortex.routing.router import WarmRoute

MAX_WAITERS = 256
RETRY_CROWDED = 5


class WaitingRequest(Protocol):
    """Interface of a request that waits until its model is loaded."""

    @property
    def priority(self) -> int:
        """Priority of the request; a higher number is served first."""
        ...

    @property
    def enqueued(self) -> float:
        """Time at which the request arrived (monotonic seconds)."""
        ...


class PendingLoad:
    """A model that must be loaded, and the requests that wait for it.

    Attributes:
        model: the model id.
        outcome: future that is resolved with the node and URL that serve the model, or with the error response.
        job: the running load; None if the load has not started.
        delayed: the decision that the load must wait, with its probable node and start; None if there is none.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.outcome: asyncio.Future[WarmRoute] = asyncio.get_running_loop().create_future()
        self.job: LoadJob | None = None
        self.delayed: DelayedPlacement | None = None
        self._waiters: list[WaitingRequest] = []

    @property
    def since(self) -> float:
        """Arrival time of the oldest waiting request (monotonic seconds); infinity if no request waits."""
        return min((waiter.enqueued for waiter in self._waiters), default=inf)

    @property
    def priority(self) -> int:
        """Highest priority among the waiting requests; 0 if no request waits."""
        return max((waiter.priority for waiter in self._waiters), default=0)

    def has_waiters(self) -> bool:
        """Return whether any request waits for the model."""
        return bool(self._waiters)

    @contextmanager
    def waiting(self, request: WaitingRequest) -> Iterator[None]:
        """Return a context manager during which `request` counts as waiting for the model.

        Raises:
            ApiError: 503 if `MAX_WAITERS` requests already wait for the model.
        """
        if len(self._waiters) >= MAX_WAITERS:
            raise overloaded(f"too many requests wait for model '{self.model}' to load", RETRY_CROWDED)
        self._waiters.append(request)
        try:
            yield
        finally:
            self._waiters.remove(request)
