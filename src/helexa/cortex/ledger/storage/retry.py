"""Retries a gateway's work on the ledger's database."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from helexa.cortex.ledger.storage.database import DatabaseError

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_RETRY_SECS = 0.25  # doubles with every retry
_LONGEST_RETRY_SECS = 2.0  # upper limit of the delay
_FRESH_SECS = 1.0


class Retry:
    """Repeats work on the database until it succeeds, and records whether the database can be written.

    Attributes:
        problem: why the database cannot be written, or None if the last attempt succeeded.
        written_at: when an attempt last succeeded (`time.monotonic`).
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        self.written_at = float("-inf")

    @property
    def fresh(self) -> bool:
        """True if work on the database succeeded within the last second."""
        return time.monotonic() - self.written_at < _FRESH_SECS

    async def until_done(
        self,
        work: Callable[[], Awaitable[T]],
        failed: Callable[[float], None],
        retried: type[Exception] = Exception,
    ) -> T:
        """Repeat `work` with increasing delays until it succeeds, and return its result.

        Args:
            work: makes one attempt.
            failed: called after each failed attempt with the seconds since the first attempt began.
            retried: exception type after which `work` is repeated; other exceptions are raised.
        """
        started_at, delay = time.monotonic(), FIRST_RETRY_SECS
        while True:
            try:
                outcome = await work()
            except retried as error:
                self._record_problem(error)
                failed(time.monotonic() - started_at)
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LONGEST_RETRY_SECS)
            else:
                if self.problem is not None:
                    log.info("the ledger's database can be written again")
                self.problem, self.written_at = None, time.monotonic()
                return outcome

    def _record_problem(self, error: Exception) -> None:
        """Store why the database cannot be written. Log the reason if it differs from the previous one."""
        message = str(error) if isinstance(error, DatabaseError) else f"unexpected {type(error).__name__}: {error}"
        if message != self.problem:
            log.error("%s; no budget can be reserved until the database can be written", message)
        self.problem = message
