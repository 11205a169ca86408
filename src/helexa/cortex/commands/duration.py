"""Parsing and formatting of durations such as `90s`, `15m`, `24h`, `30d` and `2w`."""

from helexa.core.errors import UsageError

_UNITS = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_duration(text: str) -> int:
    """Parse a duration such as `15m`, and return its number of seconds.

    Raises:
        UsageError: the text is not a duration.
    """
    number, unit = text[:-1], text[-1:]
    if not (number.isascii() and number.isdigit() and unit in _UNITS and 0 < int(number) < 10**6):
        raise UsageError(f"'{text[:40]}' is not a duration; write it like 90s, 15m, 24h, 30d or 2w")
    return int(number) * _UNITS[unit]


def duration_text(seconds: float) -> str:
    """Format `seconds`, rounded to an integer, as a duration such as `15m`, in the largest unit without a remainder."""
    whole_seconds = round(seconds)
    unit = next((unit for unit, size in _UNITS.items() if whole_seconds and whole_seconds % size == 0), "s")
    return f"{whole_seconds // _UNITS[unit]}{unit}"
