"""Reads GPU memory, utilization and temperature of a target during a sample."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from helexa.bench.measurement.clock import Clock
from helexa.bench.store.rows import Reading
from helexa.bench.targets.target import TargetError, TargetServer

_MOST = 20_000  # readings of one sample


@asynccontextmanager
async def watching(server: TargetServer, interval_secs: float, clock: Clock) -> AsyncIterator[list[Reading]]:
    """Poll the accelerators of `server` every `interval_secs` during the `with` block.

    The provided list grows during the block. One more reading is added at the end of the block.
    """
    start = clock.now()
    readings: list[Reading] = []

    async def look() -> None:
        with suppress(TargetError):  # the target may be too busy to answer
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
