"""Formats numbers, durations and dates for display. None becomes a dash."""

from datetime import UTC, datetime

from helexa.bench.metric_definitions import METRICS

NOTHING = "–"
UNITS = {"1/s": "req/s"}  # display names of units whose internal names are hard to understand


def number(value: float | None) -> str:
    """Return `value` with three significant digits.

    Integers and values from 100 up are shown without decimals.
    """
    if value is None:
        return NOTHING
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """Return a duration in µs, ms, s or min, depending on its size.

    `value` is in seconds.
    """
    if value is None:
        return NOTHING
    if value == 0:
        return "0 ms"
    size = abs(value)
    if size < 0.001:
        return f"{number(value * 1e6)} µs"
    if size < 1:
        return f"{number(value * 1e3)} ms"
    return f"{number(value)} s" if size < 600 else f"{number(value / 60)} min"


def measured(value: float | None, metric: str) -> str:
    """Return the value of a metric with the metric's unit."""
    if value is None:
        return NOTHING
    unit = METRICS[metric].unit
    if unit == "s":
        return seconds(value)
    return f"{number(value)} {UNITS.get(unit, unit)}" if unit else share(value)


def share(value: float | None) -> str:
    """Return a share from 0 to 1 as a percentage."""
    return NOTHING if value is None else f"{value * 100:.1f} %".replace(".0 %", " %")


def change(ratio: float | None) -> str:
    """Return a ratio as a percentage change with sign: 1.05 becomes `+5.0 %`."""
    return NOTHING if ratio is None else f"{(ratio - 1) * 100:+.1f} %".replace("-", "−")


def moment(ms: int | None) -> str:
    """Return the UTC date and time to the minute. `ms` is in epoch milliseconds."""
    return NOTHING if ms is None else _at(ms).strftime("%Y-%m-%d %H:%M")


def day(ms: int | None) -> str:
    """Return the UTC date. `ms` is in epoch milliseconds."""
    return NOTHING if ms is None else _at(ms).strftime("%Y-%m-%d")


def memory(mb: float | None) -> str:
    """Return an amount of memory in GiB. `mb` is in MiB."""
    return NOTHING if mb is None else f"{number(mb / 1024)} GiB"


def _at(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)
