"""Periodic background work of a gateway."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


async def repeat(work: Callable[[], Awaitable[None]], interval_secs: float, problem: str) -> None:
    """Call `work` every `interval_secs` until cancelled, regardless of exceptions.

    The log shows the first failure of a series, and the success that ends the series.

    Args:
        work: one run.
        interval_secs: pause before each run.
        problem: log message for a failed run.
    """
    has_failed = False
    while True:
        await asyncio.sleep(interval_secs)
        try:
            await work()
        except Exception as error:
            if not has_failed:
                log.warning("%s: %s", problem, error or type(error).__name__)
            has_failed = True
        else:
            if has_failed:
                log.info("solved: %s", problem)
            has_failed = False
