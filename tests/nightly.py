"""Which cases `make test` runs, and which run only in `make nightly`."""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

NIGHTLY = os.environ.get("HELEXA_NIGHTLY") == "1"


def cases(daily: int, nightly: int, variable: str | None = None) -> int:
    """Return how many cases a test draws in this run; the environment variable `variable` overrides both numbers."""
    override = os.environ.get(variable) if variable else None
    return int(override) if override else nightly if NIGHTLY else daily


def daily(chosen: Collection[Any], every: Iterable[Any], *, several: bool = False) -> list[Any]:
    """Return `every` as test parameters; only `make nightly` runs those that are not in `chosen`.

    Args:
        several: whether each case is a tuple with the values of several parameters.
    """
    assert not isinstance(every, set), "processes of one run would collect a set in different orders"
    nightly = pytest.mark.nightly
    return [case if case in chosen else pytest.param(*(case if several else (case,)), marks=nightly) for case in every]
