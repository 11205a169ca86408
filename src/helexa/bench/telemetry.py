"""Readings of a target's accelerators while it is measured."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from helexa.bench.measurement.clock import Clock
from helexa.bench.store.rows import Reading
from helexa.bench.targets.target import TargetError, TargetServer

_MOST = 20_000  # readings of one sample


@asynccontextmanager
async def watching(server: TargetServer, interval_secs: float, clock: Clock) -> AsyncIterator[list[Reading]]:
    """Collect readings in the list, from the block's beginning until its end, one more at the very end."""
    start = clock.now()
    readings: list[Reading] = []

    async def look() -> None:
        with suppress(TargetError):  # it may be too busy to say
            readings.extend(await server.readings(clock.now() - start))

    async def watch() -> None:
        while len(readings) < _MOST:
            await look()
            await clock.sleep_until(clock.now() + interval_secs)

    watcher = asyncio.create_task(watch())
    try:
        yield readings
    finally:
        watcher.cancel()
        await asyncio.wait([watcher])
    await look()
