"""Computes the data of charts, which the script `static/bench.js` draws in the browser."""

from collections.abc import Iterable, Sequence
from typing import Any

from helexa.bench.measurement.metrics import METRICS
from helexa.bench.pages.formatting import UNITS
from helexa.bench.results.capacity import Capacity
from helexa.bench.results.runs import RunDetail
from helexa.bench.results.scaling import Scaling
from helexa.bench.results.series import Series

Chart = dict[str, Any]
_MS = 1000
_OFTEN = 40
_TICK_SHARE = 0.07  # minimum distance of tick labels as a share of the axis


def trend(series: Series, by: str, baseline: float | None) -> Chart:
    """Return a chart of a metric over builds, with median, 10th to 90th percentile, fitted level and change points.

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
                "colour": 0,
            }
        ],
        "series": lines,
        "marks": [*_notes(series, places), *_changes(series, places)],
        "unit": unit,
        "title": METRICS[series.metric].title,
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
    """Return a vertical mark for each new minor version. Return no marks if there would be more than 40."""
    charts: list[Chart] = []
    previous = None
    for place, point in zip(places, series.points, strict=True):
        minor = ".".join(point.version.split(".")[:2])
        if previous is not None and minor != previous:
            charts.append({"x": place, "faint": True})
        previous = minor
    return charts if len(charts) <= _OFTEN else []


def loads(capacity: Capacity, columns: Sequence[tuple[str, str]]) -> Chart:
    """Return a chart with one line for each of `columns`. The x axis is the load (concurrency or request rate).

    Args:
        capacity: measurements at each load.
        columns: pairs of two names: the field of `CapacityPoint` to draw, and the metric that has the line's unit and
            title.
    """
    values = {name: [getattr(point, name) for point in capacity.points] for name, _ in columns}
    scale, unit = _unit(columns[0][1], [value for name, _ in columns for value in values[name] if value is not None])
    lines = [
        _line(_title(name, metric), unit, [None if v is None else v * scale for v in values[name]], colour)
        for colour, (name, metric) in enumerate(columns)
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
    """Return a chart with one point per load. x is the decode rate of one user, y is the server's total throughput."""
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
        "title": "Throughput against the rate of one user",
    }


def ladders(scalings: Sequence[Scaling], column: str) -> Chart:
    """Return a chart that shows how a rate depends on the context length. It has one line for each of `scalings`.

    Args:
        scalings: rates by context length.
        column: `prefill_tps` or `decode_tps`.
    """
    lengths = sorted({point.prompt_tokens for scaling in scalings for point in scaling.points if point.prompt_tokens})
    lines = []
    for colour, scaling in enumerate(scalings):
        by_length = {point.prompt_tokens: getattr(point, column) for point in scaling.points}
        lines.append(_line(scaling.kind, "tok/s", [by_length.get(length) for length in lengths], colour))
    return {
        "x": {"kind": "log", "values": lengths, "ticks": _ticks(lengths), "unit": "tokens of context"},
        "series": lines,
        "zero": True,
        "height": 240,
        "unit": "tok/s",
        "title": "Prefill rate" if column == "prefill_tps" else "Decode rate",
    }


def _ticks(lengths: Sequence[float]) -> list[float]:
    """Return those context lengths on a logarithmic axis that have enough space for a label."""
    positions: list[float] = []
    for length in lengths:
        if not positions or length >= positions[-1] * (lengths[-1] / lengths[0]) ** _TICK_SHARE:
            positions.append(length)
    return positions


def telemetry(detail: RunDetail) -> Chart | None:
    """Return a chart of GPU utilization during a sample, or None if there are fewer than two readings."""
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
        "title": "Utilisation",
    }


def _line(label: str, unit: str, values: Sequence[float | None], colour: int, style: str = "line") -> Chart:
    return {"label": label, "unit": unit, "values": list(values), "colour": colour, "style": style}


def _unit(metric: str, values: Sequence[float]) -> tuple[float, str]:
    """Return the factor by which a chart multiplies the values of a metric, and the unit of the products.

    Durations below one second are converted to milliseconds, shares to percent.
    """
    unit = METRICS[metric].unit
    if unit == "s" and values and max(values) < 1:
        return _MS, "ms"
    return (100, "%") if not unit else (1, UNITS.get(unit, unit))
