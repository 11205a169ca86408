"""Functions that run a benchmark's coroutine and print its results as JSON lines."""

import asyncio
import json
import os
import signal
from typing import Any


def print_line(**line: object) -> None:
    """Print the keyword arguments as one JSON line, with rounded numbers."""
    print(json.dumps({name: _rounded(value) for name, value in line.items()}), flush=True)


def print_verdict(row: str, value: float, threshold: str, holds: bool) -> None:
    """Print a JSON line with a result, its threshold, and whether the result meets the threshold.

    Args:
        row: name of the result.
        value: the result.
        threshold: text, for example `<= 1`.
        holds: whether the result meets the threshold.
    """
    print_line(verdict=row, value=value, threshold=threshold, holds=holds)


def run(work: Any) -> None:
    """Run the coroutine of a benchmark. SIGTERM interrupts it like Ctrl-C, so that its servers are stopped too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        os._exit(130)


def _rounded(value: object) -> object:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value
