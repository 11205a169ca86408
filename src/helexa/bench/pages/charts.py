"""Data of the charts that static/bench.js draws, and SVG drawings in tables."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from helexa.bench.metric_definitions import METRICS
from helexa.bench.pages.formatting import UNITS
from helexa.bench.results.capacity_and_scaling import Capacity, Scaling
from helexa.bench.results.runs_and_scores import RunDetail
from helexa.bench.results.series import Series
from helexa.bench.store.row_types import RequestRow
from helexa.bench.verdicts_and_change_points import Interval

Chart = dict[str, Any]
_MS = 1000
_ONE_BUILD = "One build only: a trend begins with the second build."
_OFTEN = 40
_TICK_SHARE = 0.07  # minimum distance of tick labels as a share of the axis


def trend(series: Series, by: str, baseline: float | None) -> Chart:
    """Return a chart of a metric over builds, with spread and change points.

    Args:
        series: values of the metric for each build.
        by: `time` for a time axis, otherwise one position per build.
        baseline: value to draw as a horizontal line, or None.
    """
    scale, unit = _unit(series.metric, [point.p50 for point in series.points])
    points = series.points
    places = [point.at_ms / _MS for point in points] if by == "time" else list(range(len(points)))

    def drawn(values: Iterable[float | None]) -> list[float | None]:
        return [None if value is None else value * scale for value in values]

    lines = [
        _line("level", unit, drawn(point.level for point in points), 5, "step"),
        _line("p50", unit, drawn(point.p50 for point in points), 0),
    ]
    if baseline is not None:
        lines.append(_line("baseline", unit, [baseline * scale] * len(points), 3, "dash"))
    return {
        "x": {
            "kind": "time" if by == "time" else "category",
            "values": places,
            "names": [point.sha for point in points],
        },
        "bands": [
            {
                "label": "p10–p90",
                "low": drawn(point.p10 for point in points),
                "high": drawn(point.p90 for point in points),
                "color": 0,
            }
        ],
        "series": lines,
        "marks": [*_notes(series, places), *_changes(series, places)],
        "unit": unit,
        "title": METRICS[series.metric].title,
        "note": _ONE_BUILD if len(points) == 1 else None,
    }


def _changes(series: Series, places: Sequence[float]) -> list[Chart]:
    worse = 1 if series.better == "lower" else -1
    return [
        {
            "x": place,
            "label": f"{point.change * 100:+.1f} %".replace("-", "−"),
            "state": "regressed" if point.change * worse > 0 else "improved",
        }
        for place, point in zip(places, series.points, strict=True)
        if point.change is not None
    ]


def _notes(series: Series, places: Sequence[float]) -> list[Chart]:
    """Return a vertical mark for each new minor version, but none if over 40."""
    # More than 40 marks would make the chart unreadable, so none are returned then.
    charts: list[Chart] = []
    previous = None
    for place, point in zip(places, series.points, strict=True):
        minor = ".".join(point.version.split(".")[:2])
        if previous is not None and minor != previous:
            charts.append({"x": place, "faint": True})
        previous = minor
    return charts if len(charts) <= _OFTEN else []


def loads(capacity: Capacity, columns: Sequence[tuple[str, str]]) -> Chart:
    """Return a chart with one line for each of `columns`.

    The x axis is the load (concurrency or request rate).

    Args:
        capacity: measurements at each load.
        columns: pairs of two names: the field of `CapacityPoint` to draw, and the metric that has the line's unit and
            title. All metrics have the same unit.
    """
    values = {name: [getattr(point, name) for point in capacity.points] for name, _ in columns}
    scale, unit = _unit(columns[0][1], [value for name, _ in columns for value in values[name] if value is not None])
    lines = [
        _line(_title(name, metric), unit, [None if v is None else v * scale for v in values[name]], color)
        for color, (name, metric) in enumerate(columns)
    ]
    marks = [] if capacity.knee is None else [{"x": capacity.knee, "label": "knee"}]
    about = "requests in flight" if capacity.loop == "closed" else "requests/s"
    return {
        "x": {"kind": "number", "values": [point.load for point in capacity.points], "unit": about},
        "series": lines,
        "marks": marks,
        "zero": True,
        "height": 240,
        "unit": unit,
        "title": " and ".join(line["label"] for line in lines),
    }


def _title(column: str, metric: str) -> str:
    return f"{METRICS[metric].title} p95" if column == "ttft_p95_s" else METRICS[metric].title


def pareto(capacities: Sequence[Capacity]) -> Chart:
    """Return a chart of total throughput by decode rate of one user.

    Each load is one point. Loads without one of the two rates are left out.
    """
    points = sorted(
        (point.decode_tps, point.output_tps, place, point.load)
        for place, capacity in enumerate(capacities)
        for point in capacity.points
        if point.decode_tps is not None and point.output_tps is not None
    )
    return {
        "x": {"kind": "number", "values": [x for x, *_ in points], "unit": "tok/s for each user"},
        "series": [
            _line(f"{capacity.loop} loop", "tok/s", [y if side == place else None for _, y, side, _ in points], place)
            for place, capacity in enumerate(capacities)
        ],
        "zero": True,
        "height": 240,
        "unit": "tok/s",
        "title": "Total throughput by decode rate of one user",
    }


def ladders(scalings: Sequence[Scaling], column: str) -> Chart:
    """Return a chart that shows how a rate depends on the context length.

    The chart has one line for each of `scalings`.

    Args:
        column: `prefill_tps` or `decode_tps`.
    """
    lengths = sorted({point.prompt_tokens for scaling in scalings for point in scaling.points if point.prompt_tokens})
    lines = []
    for color, scaling in enumerate(scalings):
        by_length = {point.prompt_tokens: getattr(point, column) for point in scaling.points}
        lines.append(_line(scaling.kind, "tok/s", [by_length.get(length) for length in lengths], color))
    return {
        "x": {"kind": "log", "values": lengths, "ticks": _ticks(lengths), "unit": "tokens of context"},
        "series": lines,
        "zero": True,
        "height": 240,
        "unit": "tok/s",
        "title": "Prefill rate" if column == "prefill_tps" else "Decode rate",
    }


def _ticks(lengths: Sequence[float]) -> list[float]:
    """Return the context lengths that get a label, far enough from the previous label."""
    positions: list[float] = []
    for length in lengths:
        if not positions or length >= positions[-1] * (lengths[-1] / lengths[0]) ** _TICK_SHARE:
            positions.append(length)
    return positions


def telemetry(detail: RunDetail) -> Chart | None:
    """Return a chart of GPU utilization, or None for readings at fewer than two times."""
    devices = sorted({reading.device for reading in detail.telemetry})
    moments = sorted({reading.at_s for reading in detail.telemetry})
    utilization = {(reading.device, reading.at_s): reading.utilization_pct for reading in detail.telemetry}
    if len(moments) < 2:
        return None
    return {
        "x": {"kind": "number", "values": moments, "unit": "s"},
        "series": [
            _line(f"device {device}", "%", [utilization.get((device, at)) for at in moments], place)
            for place, device in enumerate(devices)
        ],
        "zero": True,
        "height": 180,
        "unit": "%",
        "title": "GPU utilization",
    }


def _line(label: str, unit: str, values: Sequence[float | None], color: int, style: str = "line") -> Chart:
    return {"label": label, "unit": unit, "values": list(values), "color": color, "style": style}


def _unit(metric: str, values: Sequence[float]) -> tuple[float, str]:
    """Return the factor and the unit with which a chart shows a metric.

    If all `values` are below one second, durations are converted to milliseconds. Shares are converted to percent.
    """
    unit = METRICS[metric].unit
    if unit == "s" and values and max(values) < 1:
        return _MS, "ms"
    return (100, "%") if not unit else (1, UNITS.get(unit, unit))


SPARK = (84.0, 20.0)
FOREST = (260.0, 20.0)
TIMELINE_WIDTH = 1000.0
ROW_HEIGHT = 14.0
MOST_BARS = 120
_MARGIN = 2.0
_MOST_TICKS = 400


def spark(values: Sequence[float]) -> tuple[str, float, float] | None:
    """Return the SVG path of a sparkline, and x and y of its last point.

    Return None for fewer than three values.
    """
    if len(values) < 3:
        return None
    width, height = SPARK
    low, high = min(values), max(values)
    value_range = max(high - low, 0.04 * abs(high)) or 1.0
    middle = (low + high) / 2
    step = (width - 2 * _MARGIN) / (len(values) - 1)
    points = [
        (round(_MARGIN + place * step, 1), round(height / 2 - (value - middle) / value_range * (height - 6), 1))
        for place, value in enumerate(values)
    ]
    return "M" + "L".join(f"{x} {y}" for x, y in points), *points[-1]


@dataclass(frozen=True, slots=True)
class Forest:
    """A forest chart: positions of a ratio and its confidence interval, in pixels.

    `ratio` is the position of the ratio, and `one` is the position of the value 1. `low` and `high` are the positions
    of the interval's bounds.
    """

    one: float
    low: float
    high: float
    ratio: float


def forest_scale(ratios: Sequence[Interval]) -> float:
    """Return the upper end of the charts' common axis for `ratios`, from 1.1 to 4.

    The lower end of the axis is 1 divided by the upper end.
    """
    factors = [max(one.high, 1 / one.low) for one in ratios if one.low > 0]
    return min(4.0, max([1.1, *factors]))


def forest(ratio: Interval, scale: float) -> Forest:
    """Return the positions of `ratio`, limited to an axis from 1/`scale` to `scale`."""
    width = FOREST[0]

    def place(value: float) -> float:
        share = math.log(min(max(value, 1 / scale), scale)) / math.log(scale)
        return round(width / 2 + share * (width / 2 - 6), 1)

    return Forest(place(1), place(ratio.low), place(ratio.high), place(ratio.ratio))


@dataclass(frozen=True, slots=True)
class Bar:
    """One request in a timeline: segments for queue, prefill and decode.

    The fields `start` (scheduled time), `queued` (end of the queue), `first` (first chunk, or the end without
    chunks) and `end` are x positions from 0 to 1000. `ticks` is the SVG path of a mark for each received chunk, or only
    for every nth chunk if there are many.
    """

    y: float
    start: float
    queued: float
    first: float
    end: float
    status: str
    number: int
    ticks: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """A drawing of the requests of a sample over time."""

    bars: list[Bar]  # the requests that are drawn
    height: float  # height in pixels
    marks: list[tuple[float, float]]  # x position and time in seconds of each mark on the time axis
    left_out: int  # number of requests that are not drawn


def timeline(requests: Sequence[RequestRow]) -> Timeline | None:
    """Return the timeline of the first 120 requests, or None without requests."""
    if not requests:
        return None
    shown = requests[:MOST_BARS]
    end = max(1e-9, *(row.ended_s for row in shown))

    def x(moment: float) -> float:
        return round(moment / end * TIMELINE_WIDTH, 2)

    ticks = max(1, sum(len(row.chunks_s) for row in shown) // (_MOST_TICKS * 8))
    bars = [
        Bar(
            y=place * ROW_HEIGHT,
            start=x(row.scheduled_s),
            queued=x(row.sent_s + (row.queue_s or 0)),
            first=x(row.sent_s + row.ttft_s) if row.ttft_s is not None else x(row.ended_s),
            end=x(row.ended_s),
            status=row.status,
            number=row.number,
            ticks="".join(f"M{x(row.sent_s + at)} {place * ROW_HEIGHT + 8}v3" for at in row.chunks_s[:: ticks or 1]),
        )
        for place, row in enumerate(shown)
    ]
    step = _round_step(end / 8)
    marks = [(x(place * step), place * step) for place in range(int(end / step) + 1)]
    return Timeline(bars, len(shown) * ROW_HEIGHT, marks, len(requests) - len(shown))


def _round_step(size: float) -> float:
    power = 10.0 ** math.floor(math.log10(size))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= size)
