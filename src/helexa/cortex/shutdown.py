"""Shutdown of a gateway: rejects new requests, and waits for running requests."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

from helexa.core.errors import shutting_down
from helexa.core.logs import tell
from helexa.http.listener import Listener
from helexa.http.process import notify

log = logging.getLogger(__name__)


class Drain:
    """Counts running requests (as context manager), and waits for their end."""

    def __init__(self) -> None:
        self.begun = False  # True if the gateway rejects new requests, because it shuts down
        self.running = 0  # number of running requests
        self._idle = asyncio.Event()

    def __enter__(self) -> None:
        self.running += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.running -= 1
        if self.begun and not self.running:
            self._idle.set()

    def check(self) -> None:
        """Raise an `ApiError` if the gateway rejects new requests."""
        if self.begun:
            raise shutting_down()

    async def run(self, secs: float) -> int:
        """Reject new requests, and wait at most `secs` seconds until no request runs.

        Return the number of requests that still run.
        """
        self.begun = True
        if self.running:
            with suppress(TimeoutError):
                async with asyncio.timeout(secs):
                    await self._idle.wait()
        return self.running


class Shutdown:
    """Ends a gateway's listeners after its running requests."""

    def __init__(self, drain: Drain, drain_secs: Callable[[], float], listeners: Sequence[Listener]) -> None:
        self._requests = drain
        self._drain_secs = drain_secs  # a function, because a reload may change the setting
        self._listeners = listeners
        self._draining: asyncio.Task[None] | None = None

    def signal(self) -> None:
        """Begin the drain at the first signal, and end the listeners at the second signal."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:
            self._end()

    async def _drain(self) -> None:
        secs = self._drain_secs()
        tell(log, logging.INFO, "draining", drain_secs=secs)
        notify("STOPPING=1")
        if left := await self._requests.run(secs):
            tell(log, logging.WARNING, "drain timed out", drain_secs=secs, requests=left)
        self._end()

    def _end(self) -> None:
        for listener in self._listeners:
            listener.should_exit = True
