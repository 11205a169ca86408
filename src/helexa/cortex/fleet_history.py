"""The last hour of the fleet, in memory, for the console.

The size of the history is bounded: one number per interval and field for the fleet, for each of at most `MAX_NAMES`
nodes, and for each of at most `MAX_NAMES` models. Fewer than `MAX_FINISHED` finished requests wait to be counted.
"""

import asyncio
import math
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

from helexa.cortex.fleet.fleet_view import FleetView, Node, machine_of
from helexa.cortex.ledger.activity_and_usage_totals import Activity

INTERVAL_SECS = 15
INTERVALS = 240
SAMPLE_SECS = 5.0
MAX_NAMES = 500
MAX_FINISHED = 1000

By = Literal["fleet", "node", "model"]
Ring: TypeAlias = "array[float]"


class _Series:
    """Measurements of the fleet, a node or a model: a ring buffer per field.

    A ring buffer has one value for each of the last `INTERVALS` intervals.

    Attributes:
        tokens: output tokens of finished requests, spread over the time in which a request generated them.
        first_token_ms, first_tokens: sum of the times to first token in milliseconds, and the number of these times.
        queued, running: largest number of waiting and of running requests among the samples of an interval.
        memory_used, memory_total: last sampled memory of the interval in MiB. NaN if it is unknown.
        used_at: last interval with a value. An interval is numbered by its Unix time divided by `INTERVAL_SECS`.
    """

    def __init__(self) -> None:
        self.tokens, self.first_token_ms, self.first_tokens, self.queued, self.running = (_ring(0.0) for _ in range(5))
        self.memory_used, self.memory_total = _ring(math.nan), _ring(math.nan)
        self.used_at = 0

    def forget(self, place: int) -> None:
        """Reset the values at index `place` of the rings, before a new interval uses them."""
        for ring in (self.tokens, self.first_token_ms, self.first_tokens, self.queued, self.running):
            ring[place] = 0.0
        self.memory_used[place] = self.memory_total[place] = math.nan


class History:
    """Collects measurements of a fleet in the last hour, in `INTERVALS` intervals."""

    def __init__(self, view: Callable[[], FleetView], clock: Callable[[], float] = time.time) -> None:
        self._view, self._clock = view, clock
        # requests that `_count_finished` has not counted yet, each with the time of its end (Unix seconds)
        self._finished: list[tuple[float, Activity]] = []
        self._series: dict[By, dict[str, _Series]] = {"fleet": {}, "node": {}, "model": {}}
        self._first = self._current = int(clock()) // INTERVAL_SECS  # numbers of the first and the current interval

    async def run(self) -> None:
        """Sample the nodes until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_SECS)

    def sample(self) -> None:
        """Add the current requests and memory of all nodes to the current interval."""
        place = self._count_finished()
        view = self._view()
        running, queued = dict(view.in_flight), dict[tuple[str, str], int]()
        memory: defaultdict[tuple[By, str], list[tuple[float, float]]] = defaultdict(list)
        machines: set[str] = set()
        for node in view.nodes:
            if not node.healthy or node.health is None:
                continue
            for load in node.health.models:
                pair = (node.name, load.id)
                running[pair] = max(running.get(pair, 0), load.in_flight)
                queued[pair] = load.queue_depth
            if (found := _memory(node)) is not None:
                machine = machine_of(node)
                # Several nodes on one machine report the same memory, so the fleet's sum includes only one of them.
                if machine is None or machine not in machines:
                    memory["fleet", ""].append(found)
                machines |= {machine} if machine is not None else set()
                memory["node", node.name].append(found)
        for field, counts in (("running", running), ("queued", queued)):
            sums: defaultdict[tuple[By, str], int] = defaultdict(int)
            for (node_name, model), count in counts.items():
                if count:
                    for key in _keys(node_name, model):
                        sums[key] += count
            for key, count in sums.items():
                if (series := self._find(*key)) is not None:
                    ring: Ring = getattr(series, field)
                    ring[place] = max(ring[place], count)
        for key, known in memory.items():
            if (series := self._find(*key)) is not None:
                series.memory_used[place] = sum(used for used, _ in known)
                series.memory_total[place] = sum(total for _, total in known)

    def observe(self, activity: Activity) -> None:
        """Add the tokens and the time to first token of a finished request."""
        if activity.node is not None and (activity.completion or activity.ttft_ms is not None):
            self._finished.append((self._clock(), activity))
            if len(self._finished) == MAX_FINISHED:
                self._count_finished()

    def _count_finished(self) -> int:
        """Count newly finished requests; return the current interval's index in the rings."""
        finished, self._finished = self._finished, []
        for now, activity in finished:
            assert activity.node is not None
            place = self._advance(now)
            end = min(now, (activity.started_ms + activity.duration_ms) / 1000)
            start = min(end, (activity.started_ms + (activity.ttft_ms or 0.0)) / 1000)
            tokens = [
                (interval % INTERVALS, activity.completion * share)
                for interval, share in _shares(start, end)
                if self._current - INTERVALS < interval <= self._current
            ]
            for by, name in _keys(activity.node, activity.model):
                if (series := self._find(by, name)) is not None:
                    if activity.ttft_ms is not None:
                        series.first_token_ms[place] += activity.ttft_ms
                        series.first_tokens[place] += 1
                    for at, count in tokens:
                        series.tokens[at] += count
        return self._advance(self._clock())

    def report(self, by: By, limit: int) -> dict[str, Any]:
        """Return the measurements of the complete intervals as JSON, oldest first.

        `by` selects the fleet, nodes or models. The `limit` nodes or models with the most output tokens come first. If
        there are more, a last element with the name None has the sums of the others. Values before the start of the
        gateway are None. In an interval without measurements, the time to first token and the memory are None, and
        other values are 0.
        """
        self._count_finished()
        ranked = sorted(self._series[by].items(), key=lambda item: (-sum(item[1].tokens), item[0]))
        series = [{"name": name, **self._values([one])} for name, one in ranked[:limit]]
        if others := [one for _, one in ranked[limit:]]:
            series.append({"name": None, **self._values(others)})
        return {"interval_secs": INTERVAL_SECS, "end": self._current * INTERVAL_SECS, "by": by, "series": series}

    def _values(self, series: list[_Series]) -> dict[str, list[float | None]]:
        """Return the report's fields for all `series` together, one value per interval."""
        tokens, waits, counted, queued, running = (
            self._sums(getattr(one, name) for one in series)
            for name in ("tokens", "first_token_ms", "first_tokens", "queued", "running")
        )
        unknown: list[float | None] = [None] * max(0, self._first - (self._current - INTERVALS + 1))
        fields: dict[str, list[float | None]] = {
            "tokens_per_second": [round(value / INTERVAL_SECS, 1) for value in tokens],
            "queued": [round(value) for value in queued],
            "running": [round(value) for value in running],
            "first_token_ms": [
                round(wait / count, 1) if count else None for wait, count in zip(waits, counted, strict=True)
            ],
        }
        for name in ("memory_used", "memory_total"):
            sums = self._sums(getattr(one, name) for one in series)
            fields[f"{name}_mb"] = [None if math.isnan(value) else round(value) for value in sums]
        return {name: unknown + values[len(unknown) :] for name, values in fields.items()}

    def _sums(self, rings: Iterable[Ring]) -> list[float]:
        """Return the sum of the rings for each complete interval, oldest first.

        A sum without known values is NaN.
        """
        place = self._current % INTERVALS
        first, *others = ([*ring[place + 1 :], *ring[:place]] for ring in rings)
        if not others:
            return first
        return [_sum_of_known(values) for values in zip(first, *others, strict=True)]

    def _find(self, by: By, name: str) -> _Series | None:
        """Return the series of `name`, or a new one. None if `MAX_NAMES` others exist."""
        known = self._series[by]
        series = known.get(name)
        if series is None and len(known) < MAX_NAMES:
            series = known[name] = _Series()
        if series is not None:
            series.used_at = self._current
        return series

    def _advance(self, time: float) -> int:
        """Advance the current interval to a Unix time, and return its index in the rings.

        Values older than an hour are removed.
        """
        now = int(time) // INTERVAL_SECS
        if now > self._current:
            for interval in range(max(self._current + 1, now - INTERVALS + 1), now + 1):
                for known in self._series.values():
                    for series in known.values():
                        series.forget(interval % INTERVALS)
            self._current = now
            for known in self._series.values():
                for name in [name for name, one in known.items() if one.used_at <= now - INTERVALS]:
                    del known[name]
        return self._current % INTERVALS


def _sum_of_known(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) if known else math.nan


def _keys(node: str, model: str) -> tuple[tuple[By, str], ...]:
    return ("fleet", ""), ("node", node), ("model", model)


def _ring(value: float) -> Ring:
    return array("f", [value]) * INTERVALS


def _shares(start: float, end: float) -> list[tuple[int, float]]:
    """Return the intervals from `start` to `end` (Unix times), each with its share.

    The share is the fraction of the time from `start` to `end` that lies in the interval.
    """
    first, last = int(start // INTERVAL_SECS), int(end // INTERVAL_SECS)
    if first == last:
        return [(first, 1.0)]
    shares: list[tuple[int, float]] = []
    for interval in range(max(first, last - INTERVALS), last + 1):
        inside = min(end, (interval + 1) * INTERVAL_SECS) - max(start, interval * INTERVAL_SECS)
        shares.append((interval, inside / (end - start)))
    return shares


def _memory(node: Node) -> tuple[float, float] | None:
    """Return the used and the total memory of a node in MiB; None if unknown."""
    health = node.health
    if health is None:
        return None
    if health.devices:
        used = sum(device.vram_used_mb for device in health.devices)
        return used, used + sum(device.vram_free_mb for device in health.devices)
    if health.memory_total_mb is None or health.memory_free_mb is None:
        return None
    return health.memory_total_mb - health.memory_free_mb, health.memory_total_mb
