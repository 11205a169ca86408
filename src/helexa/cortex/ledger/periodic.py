"""Periodic background work of a gateway."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


async def repeat(work: Callable[[], Awaitable[None]], interval_secs: float, problem: str) -> None:
    """Call `work` again and again until cancelled, with a pause of `interval_secs` before each call.

    An exception of `work` does not stop the repetition. Of several failures in a row, only the first is logged. The
    next success is logged too.

    Args:
        work: the function to call.
        interval_secs: pause before each call.
        problem: log message for a failed call.
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
