"""Finds the builds at which a metric changed, in a series of one value per build.

The series is fitted by a piecewise constant function (Potts model). Dynamic programming over all O(n^2) possible
segments finds the best fit.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# In units of scatter times log(series length). BIC uses 1. A higher penalty avoids false change points.
_PENALTY = 3.0
# Smaller scatter is coincidence, for example equal medians of two builds.
_LEAST_SCALE = 0.005
# Lower bound for logarithms.
_LEAST_VALUE = 1e-6
# Ratio of the median absolute difference of two normal values to the mean absolute deviation of one value.
_NEIGHBOURS = 1.196


@dataclass(frozen=True)
class Level:
    """A run of consecutive builds with the same fitted value: from index `start` to before index `end`."""

    start: int
    end: int
    value: float


def levels(values: Sequence[float]) -> list[Level]:
    """Return the segments of a piecewise constant fit of `values`, oldest first. An empty series has no segments.

    The fit uses the logarithms of the values. It minimizes the sum of absolute errors plus a penalty for each segment.

    Args:
        values: one non-negative number per build, oldest first. The time of the fit grows quadratically with the
            number of values, so pass at most a few hundred.
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
    """Estimate the scatter: the mean absolute deviation of values from the level of their segment.

    The segments are not known yet, so the estimate uses the differences of adjacent values.
    """
    if len(logs) < 2:
        return _LEAST_SCALE
    return max(_LEAST_SCALE, float(np.median(np.abs(np.diff(logs)))) / _NEIGHBOURS)


def _segment_costs(logs: np.ndarray) -> np.ndarray:
    """Return a matrix of fitting errors. Entry `[first, last]` is the error of the segment from `first` to `last`.

    The error is the sum of absolute deviations from the segment's median. Entries with `last` < `first` are inf.
    """
    count = len(logs)
    costs = np.full((count, count), np.inf)
    for first in range(count):
        ordered: list[float] = []
        cost = 0.0
        for last, value in enumerate(logs[first:].tolist(), first):
            if ordered:
                # The cost grows by the distance of the value from the interval between the middle values.
                low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
                cost += max(low - value, value - high, 0.0)
            insort(ordered, value)
            costs[first, last] = cost
    return costs
