"""The number of cases that randomized tests draw: few in `make test`, many in `make nightly`."""

import os

NIGHTLY = os.environ.get("HELEXA_NIGHTLY") == "1"


def cases(daily: int, nightly: int, variable: str | None = None) -> int:
    """Return how many cases a test draws in this run; the environment variable `variable` overrides both numbers."""
    override = os.environ.get(variable) if variable else None
    return int(override) if override else nightly if NIGHTLY else daily
