"""Load generators: closed loop (fixed concurrency) and open loop (fixed arrival times)."""

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
"""Function that sends one request. Its argument is the time at which the request is scheduled, or None."""

Arrivals = Literal["poisson", "constant"]

_MAX_IN_FLIGHT = 2048
_LOOK_AFTER = 20  # arrivals; fewer show no trend
_SURE = 3.3  # standard errors of a slope; about one false alarm in a thousand tests
_SHED_SHARE = 0.05
_LATER = 1.5
_STUCK_SHARE = 0.2  # growth of the number of requests in flight, per arrival
_PAUSE_AFTER_FAILURE_SECS = 0.25


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """The result of sending requests at fixed arrival times.

    Attributes:
        records: records of the requests, in the order of their scheduled times.
        saturated: True if the server could not keep up: the number of requests in flight or the waiting times kept
            growing, or too many requests were rejected.
    """

    records: list[RequestRecord]
    saturated: bool


async def closed_loop(ask: Ask, concurrency: int, duration_secs: float, clock: Clock) -> list[RequestRecord]:
    """Keep `concurrency` requests in flight for `duration_secs`. Return their records, ordered by send time.

    Each simulated user sends at least one request, and waits for the response before it sends the next request. After
    `duration_secs`, users send no new requests. The function returns when the last response is complete.

    Args:
        ask: sends one request.
        concurrency: number of simulated users.
        duration_secs: seconds in which requests are sent.
        clock: source of the current time.
    """
    end = clock.now() + duration_secs
    records: list[RequestRecord] = []

    async def user() -> None:
        while True:
            record = await ask(None)
            records.append(record)
            if clock.now() >= end:
                return
            if record.status != "ok":  # do not flood a target that rejects at once
                await clock.sleep_until(clock.now() + _PAUSE_AFTER_FAILURE_SECS)

    async with asyncio.TaskGroup() as users:
        for _ in range(concurrency):
            users.create_task(user())
    return sorted(records, key=lambda record: record.sent)


def arrival_times(rate_rps: float, duration_secs: float, arrivals: Arrivals, seed: int) -> Iterator[float]:
    """Yield the send times of requests in ascending order, in seconds after the start.

    Args:
        rate_rps: average rate in requests per second.
        duration_secs: upper bound of the send times, in seconds.
        arrivals: `poisson` for random intervals, `constant` for equal intervals.
        seed: random seed of the intervals.
    """
    source = random.Random(seed)
    at = 0.0
    while at < duration_secs:
        yield at
        at += 1 / rate_rps if arrivals == "constant" else source.expovariate(rate_rps)


async def open_loop(ask: Ask, offsets: Sequence[float], clock: Clock) -> OpenLoop:
    """Send each request at its scheduled time, independent of earlier responses. Wait for all responses.

    If the number of requests in flight keeps growing, the server is saturated, and no more requests are sent.

    Args:
        ask: sends one request.
        offsets: scheduled times in seconds after the start, ascending.
        clock: source of the current time.
    """
    start = clock.now()
    in_flight: set[asyncio.Task[RequestRecord]] = set()
    tasks: list[asyncio.Task[RequestRecord]] = []
    backlog: list[int] = []  # recorded from the first answer on, as the backlog always grows before
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
    """Return whether the server could not keep up with an open loop (requests that are sent at fixed times).

    The function returns True if more than 5 % of the requests were rejected, timed out or incomplete, or if waiting
    times kept growing.
    """
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
    """Return whether the number of requests in flight keeps growing.

    The number must grow significantly in each third of the series. In the last third, it must grow by more than 0.2
    requests per arrival. These conditions exclude a server that only paused for a moment.

    Args:
        backlog: number of requests in flight at each arrival.
    """
    if len(backlog) < 2 * _LOOK_AFTER:
        return False
    thirds = [third.tolist() for third in np.array_split(np.asarray(backlog), 3)]
    return all(map(_slope_is_sure, thirds)) and _slope(thirds[-1])[0] > _STUCK_SHARE


def _slope_is_sure(series: Sequence[float]) -> bool:
    slope, error = _slope(series)
    return slope > _SURE * error


def _slope(series: Sequence[float]) -> tuple[float, float]:
    """Return the slope of the least-squares line through `series`, and the standard error of the slope."""
    y = np.asarray(series, dtype=np.float64)
    x = np.arange(y.size) - (y.size - 1) / 2
    spread = float(x @ x)
    slope = float(x @ y) / spread
    residuals = y - y.mean() - slope * x
    return slope, math.sqrt(float(residuals @ residuals) / (y.size - 2) / spread)
