"""Computes small SVG drawings for tables, which browsers show without a script."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from helexa.bench.analysis.verdict import Interval
from helexa.bench.store.rows import RequestRow

SPARK = (84.0, 20.0)
FOREST = (260.0, 20.0)
TIMELINE_WIDTH = 1000.0
ROW_HEIGHT = 14.0
MOST_BARS = 120
_MARGIN = 2.0
_MOST_TICKS = 400


def spark(values: Sequence[float]) -> tuple[str, float, float] | None:
    """Return the SVG path of a sparkline, and the coordinates x and y of its last point.

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
    """Positions for drawing a ratio and its confidence interval, in pixels from the left.

    `ratio` is the position of the ratio, and `one` is the position of the value 1. `low` and `high` are the positions
    of the interval's bounds.
    """

    one: float
    low: float
    high: float
    ratio: float


def forest_scale(ratios: Sequence[Interval]) -> float:
    """Return the upper end of the common axis for drawings of `ratios`: a ratio between 1.1 and 4.

    The lower end of the axis is 1 divided by the upper end.
    """
    factors = [max(one.high, 1 / one.low) for one in ratios if one.low > 0]
    return min(4.0, max([1.1, *factors]))


def forest(ratio: Interval, scale: float) -> Forest:
    """Return the positions for drawing `ratio` on an axis from 1 / `scale` to `scale`."""
    width = FOREST[0]

    def place(value: float) -> float:
        share = math.log(min(max(value, 1 / scale), scale)) / math.log(scale)
        return round(width / 2 + share * (width / 2 - 6), 1)

    return Forest(place(1), place(ratio.low), place(ratio.high), place(ratio.ratio))


@dataclass(frozen=True, slots=True)
class Bar:
    """One request in a timeline, drawn as consecutive segments for queue, prefill and decode.

    The fields `start`, `queued`, `first` and `end` are x positions from 0 to 1000. `ticks` is the SVG path of a mark
    for each received chunk.
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
    """A drawing of the requests of a sample over time.

    Attributes:
        bars: the requests that are drawn.
        height: height in pixels.
        marks: x position and time in seconds of each mark on the time axis.
        left_out: number of requests that are not drawn.
    """

    bars: list[Bar]
    height: float
    marks: list[tuple[float, float]]
    left_out: int


def timeline(requests: Sequence[RequestRow]) -> Timeline | None:
    """Return the timeline of the first 120 requests of a sample, or None if there are no requests."""
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
