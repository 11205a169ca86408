"""Load shapes: when requests are sent. Nothing here knows what they ask."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from helexa.bench.measurement.clock import Clock
from helexa.bench.measurement.request_record import RequestRecord

Ask = Callable[[float | None], Awaitable[RequestRecord]]
"""Send one request; its argument is when it was scheduled, if it was."""

Arrivals = Literal["poisson", "constant"]

_MAX_IN_FLIGHT = 2048
_LOOK_AFTER = 20  # arrivals; fewer show no trend
_SURE = 3.3  # standard errors: one look in a thousand errs, and there are many
_SHED_SHARE = 0.05
_LATER = 1.5
_STUCK_SHARE = 0.2  # of arrivals
_PAUSE_AFTER_FAILURE_SECS = 0.25


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """What an open loop gave.

    Attributes:
        records: in the order in which they were scheduled.
        saturated: the target fell behind: ever more requests were in flight (the loop has stopped early then), or ever
            later answered, or too many were shed.
    """

    records: list[RequestRecord]
    saturated: bool


async def closed_loop(ask: Ask, concurrency: int, duration_secs: float, clock: Clock) -> list[RequestRecord]:
    """Keep so many requests in flight: whoever has an answer asks again at once. Nobody begins after the duration, and
    everybody has begun at least once; answers are waited for. In the order in which they were sent."""
    end = clock.now() + duration_secs
    records: list[RequestRecord] = []

    async def user() -> None:
        while True:
            record = await ask(None)
            records.append(record)
            if clock.now() >= end:
                return
            if record.status != "ok":  # a target that refuses at once is not stormed
                await clock.sleep_until(clock.now() + _PAUSE_AFTER_FAILURE_SECS)

    async with asyncio.TaskGroup() as users:
        for _ in range(concurrency):
            users.create_task(user())
    return sorted(records, key=lambda record: record.sent)


def arrival_times(rate_rps: float, duration_secs: float, arrivals: Arrivals, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests are due, ascending, all before the duration is over."""
    source = random.Random(seed)
    at = 0.0
    while at < duration_secs:
        yield at
        at += 1 / rate_rps if arrivals == "constant" else source.expovariate(rate_rps)


async def open_loop(ask: Ask, offsets: Sequence[float], clock: Clock) -> OpenLoop:
    """Send each request when it is due, whatever has become of those before it.

    It stops early once the target is saturated: the number in flight has kept growing. Answers are waited for.
    """
    start = clock.now()
    in_flight: set[asyncio.Task[RequestRecord]] = set()
    tasks: list[asyncio.Task[RequestRecord]] = []
    backlog: list[int] = []  # since the first answer: until then it has to grow
    saturated = False
    async with asyncio.TaskGroup() as requests:
        for offset in offsets:
            await clock.sleep_until(start + offset)
            if len(in_flight) < len(tasks):
                backlog.append(len(in_flight))
            saturated = len(in_flight) >= _MAX_IN_FLIGHT or is_growing(backlog)
            if saturated:
                break
            task = requests.create_task(_sent(ask, start + offset))
            tasks.append(task)
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
    records = [task.result() for task in tasks]
    return OpenLoop(records, saturated or fell_behind(records))


async def _sent(ask: Ask, scheduled: float) -> RequestRecord:
    return await ask(scheduled)


def fell_behind(records: Sequence[RequestRecord]) -> bool:
    """Whether the target shed what was too much for it, or made each request wait longer than the one before."""
    shed = sum(record.status in ("rejected", "timeout", "incomplete") for record in records)
    if shed > _SHED_SHARE * len(records):
        return True
    waits = [record.deltas[0].at - record.scheduled for record in records if record.deltas]
    if len(waits) < _LOOK_AFTER:
        return False
    first, second = np.array_split(np.asarray(waits), 2)
    later = bool(np.median(second) > _LATER * np.median(first))
    return later and _slope_is_sure(waits) and _slope_is_sure(second.tolist())


def is_growing(backlog: Sequence[int]) -> bool:
    """Whether a series, one number for each arrival, keeps growing: surely so in each of its thirds, and so fast that
    of every five arrivals in the last of them one more than before is left in flight. A server that only stood still
    for a while is none that is saturated."""
    if len(backlog) < 2 * _LOOK_AFTER:
        return False
    thirds = [third.tolist() for third in np.array_split(np.asarray(backlog), 3)]
    return all(map(_slope_is_sure, thirds)) and _slope(thirds[-1])[0] > _STUCK_SHARE


def _slope_is_sure(series: Sequence[float]) -> bool:
    slope, error = _slope(series)
    return slope > _SURE * error


def _slope(series: Sequence[float]) -> tuple[float, float]:
    """Slope of the straight line nearest to a series, and its standard error."""
    y = np.asarray(series, dtype=np.float64)
    x = np.arange(y.size) - (y.size - 1) / 2
    spread = float(x @ x)
    slope = float(x @ y) / spread
    residuals = y - y.mean() - slope * x
    return slope, math.sqrt(float(residuals @ residuals) / (y.size - 2) / spread)
