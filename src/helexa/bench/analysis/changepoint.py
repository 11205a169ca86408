"""Where a series of builds changes its level: a Potts fit, exact, over all O(n^2) pieces."""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# Of the scatter's scale and the series' log length. A BIC asks 1 for a level's place and height; a page that marks
# changes where there are none is not looked at for long.
_PENALTY = 3.0
# Less than this is no scatter of a measurement but luck, such as two builds with the same median.
_LEAST_SCALE = 0.005
# What is next to nothing has no logarithm of use.
_LEAST_VALUE = 1e-6
# The median difference of two normal values to the mean absolute deviation of one.
_NEIGHBOURS = 1.196


@dataclass(frozen=True)
class Level:
    """Builds `start` up to, not including, `end` have one level."""

    start: int
    end: int
    value: float


def levels(values: Sequence[float]) -> list[Level]:
    """Piecewise constant fit of a series in order, absolute errors; at least one level, unless the series is empty.

    Args:
        values: one number a build, oldest first, none negative; at most some hundreds.
    """
    if not len(values):
        return []
    logs = np.log(np.maximum(np.asarray(values, dtype=float), _LEAST_VALUE))
    cost = _segment_costs(logs)
    penalty = _PENALTY * _scale(logs) * np.log(max(len(logs), 2))
    best = np.zeros(len(logs) + 1)
    start = np.zeros(len(logs) + 1, dtype=int)
    for end in range(1, len(logs) + 1):
        totals = best[:end] + cost[:end, end - 1] + penalty
        start[end] = int(np.argmin(totals))
        best[end] = totals[start[end]]
    bounds = [len(logs)]
    while bounds[-1] > 0:
        bounds.append(int(start[bounds[-1]]))
    pieces = [Level(first, last, float(np.exp(np.median(logs[first:last])))) for last, first in pairwise(bounds)]
    return pieces[::-1]


def _scale(logs: np.ndarray) -> float:
    """The mean absolute deviation around a level, from neighbours, of which few have a change between them."""
    if len(logs) < 2:
        return _LEAST_SCALE
    return max(_LEAST_SCALE, float(np.median(np.abs(np.diff(logs)))) / _NEIGHBOURS)


def _segment_costs(logs: np.ndarray) -> np.ndarray:
    """Sum of the absolute deviations from the median of each piece `[first, last]`, both included; inf elsewhere."""
    count = len(logs)
    costs = np.full((count, count), np.inf)
    for first in range(count):
        ordered: list[float] = []
        cost = 0.0
        for last, value in enumerate(logs[first:].tolist(), first):
            if ordered:
                # The cost grows by the way to the nearest point between the middle values, which stay the median's.
                low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
                cost += max(low - value, value - high, 0.0)
            insort(ordered, value)
            costs[first, last] = cost
    return costs
