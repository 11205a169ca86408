"""Drain of a server at SIGTERM: the server rejects new requests and waits for running requests."""

import asyncio
from contextlib import suppress
from types import TracebackType

from helexa.core.errors import shutting_down


class Drain:
    """Counts the running requests of a server, and waits for their end at a shutdown.

    The context manager counts one running request.

    Attributes:
        running: number of running requests.
        begun: True once the server rejects new requests, because it shuts down.
    """

    def __init__(self) -> None:
        self.begun = False
        self.running = 0
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
        """Raise an error if the server shuts down.

        Raises:
            ApiError: the server rejects new requests.
        """
        if self.begun:
            raise shutting_down()

    async def run(self, secs: float) -> int:
        """Reject new requests, and wait at most `secs` seconds until no request runs.

        Returns:
            The number of requests that still run.
        """
        self.begun = True
        if self.running:
            with suppress(TimeoutError):
                async with asyncio.timeout(secs):
                    await self._idle.wait()
        return self.running
