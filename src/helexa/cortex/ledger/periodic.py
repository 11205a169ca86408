"""Work that is repeated for as long as a gateway runs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


async def repeat(work: Callable[[], Awaitable[None]], interval_secs: float, problem: str) -> None:
    """Call `work` every `interval_secs`, whatever it raises, until cancelled.

    The first failure of a series is logged, and so is the success that ends the series.

    Args:
        work: one run.
        interval_secs: the pause before each run.
        problem: what the log says when `work` fails.
    """
    failing = False
    while True:
        await asyncio.sleep(interval_secs)
        try:
            await work()
        except Exception as error:
            if not failing:
                log.warning("%s: %s", problem, error or type(error).__name__)
            failing = True
        else:
            if failing:
                log.info("solved: %s", problem)
            failing = False
