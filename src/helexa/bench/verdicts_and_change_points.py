"""Statistics of builds: verdicts on a new build, and change points in a series.

The ratio is the median of the build divided by the median of the earlier builds. A build has changed if both conditions
hold:

* The confidence interval of the ratio excludes 1. A bootstrap computes the interval: it resamples the earlier builds,
  and then the samples of each build.
* The ratio differs from 1 by more than a threshold. The threshold is the larger of 3 % and twice the typical difference
  between unchanged builds.

The series is fitted by a piecewise constant function (Potts model). Dynamic programming over all O(n^2) possible
segments finds the best fit.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median
from typing import Literal

import numpy as np

Better = Literal["lower", "higher"]
State = Literal["improved", "regressed", "same", "too few"]

TRAILING_BUILDS = 5
MIN_SAMPLES = 5
MIN_EFFECT = 0.03
MAD_FACTOR = 2.0
CONFIDENCE = 0.95
CONFIRMING_CONFIDENCE = 0.98  # for alerts: each build has many configurations, so false alarms add up
RESAMPLES = 2000
_SEED = 20_260_613


@dataclass(frozen=True)
class Interval:
    """The ratio of two medians and its bootstrap confidence interval.

    Attributes:
        ratio: new median divided by old median.
        low: lower bound of the interval at `CONFIDENCE`.
        high: upper bound of the interval at `CONFIDENCE`.
        sure: True if the wider interval at `CONFIRMING_CONFIDENCE` excludes 1 too.
    """

    ratio: float
    low: float
    high: float
    sure: bool

    def excludes_one(self) -> bool:
        """Return whether 1 lies outside the interval from `low` to `high`."""
        return self.low > 1 or self.high < 1


@dataclass(frozen=True)
class Verdict:
    """The result of comparing one metric of a build with earlier builds.

    Attributes:
        state: `improved`, `regressed`, `same`, or `too few` if the build or the earlier builds have fewer than 5
            samples, or the median of the earlier builds is 0.
        interval: the build's median divided by the median of the earlier builds, with the confidence interval of this
            ratio. None if `state` is `too few`.
        threshold: smallest relative change that counts as a change.
        samples: number of samples of the build.
        trailing_samples: number of samples of the earlier builds in the comparison.
        trailing_builds: number of earlier builds in the comparison.
    """

    state: State
    interval: Interval | None
    threshold: float
    samples: int
    trailing_samples: int
    trailing_builds: int


def judge(
    history: Sequence[Sequence[float]],
    samples: Sequence[float],
    better: Better,
    *,
    known: int = 0,
    min_effect: float = MIN_EFFECT,
) -> Verdict:
    """Compare the samples of a build with the samples of up to five earlier builds.

    Args:
        history: samples of each earlier build, oldest build first. No list is empty and no value is negative. The
            comparison uses the last five builds. The threshold is computed from all builds.
        samples: samples of the build to judge.
        better: whether lower or higher values of the metric are better.
        known: index in `history` of the newest build with a confirmed change. Earlier builds are not compared.
        min_effect: lower bound of the threshold (see `least_effect`).
    """
    trailing = list(history[known:])[-TRAILING_BUILDS:]
    threshold = least_effect(history, min_effect)
    counts = {
        "threshold": threshold,
        "samples": len(samples),
        "trailing_samples": sum(map(len, trailing)),
        "trailing_builds": len(trailing),
    }
    few = len(samples) < MIN_SAMPLES or counts["trailing_samples"] < MIN_SAMPLES
    if few or not median(chain(*trailing)) > 0:
        return Verdict("too few", None, **counts)
    interval = median_ratio(trailing, samples)
    state: State = "same"
    if interval.excludes_one() and abs(interval.ratio - 1) > threshold:
        state = "regressed" if (interval.ratio > 1) == (better == "lower") else "improved"
    return Verdict(state, interval, **counts)


def confirms(verdict: Verdict, first: Sequence[float], extra: Sequence[float]) -> bool:
    """Return whether later samples confirm a suspected change.

    A change is suspected because the first samples were unusual, possibly by chance. The first samples therefore cannot
    confirm the change.

    Args:
        verdict: verdict on all samples of the build.
        first: samples from before the suspicion.
        extra: samples taken after the suspicion, without which the result is False. `first` and `extra` together are
            all samples of the build.
    """
    if verdict.state not in ("regressed", "improved") or verdict.interval is None or not len(extra):
        return False
    base = median([*first, *extra]) / verdict.interval.ratio
    ratio = median(extra) / base
    return verdict.interval.sure and abs(ratio - 1) > verdict.threshold and (ratio > 1) == (verdict.interval.ratio > 1)


def least_effect(history: Sequence[Sequence[float]], min_effect: float = MIN_EFFECT) -> float:
    """Return the smallest relative change that counts as a change.

    The result is the larger of `min_effect` and twice the typical deviation between builds. The deviation is estimated
    from the differences of adjacent builds, so a single change in the history barely raises the estimate. With fewer
    than two builds, or if a build has the median 0, the result is `min_effect`.
    """
    medians = np.array([median(build) for build in history])
    if len(medians) < 2 or not (medians > 0).all():
        return min_effect
    deviation = float(np.median(np.abs(np.diff(np.log(medians))))) / np.sqrt(2)
    return max(min_effect, MAD_FACTOR * float(deviation))


def median_ratio(base: Sequence[Sequence[float]], samples: Sequence[float]) -> Interval:
    """Return the ratio of two medians with a bootstrap confidence interval.

    The bootstrap uses a fixed seed, so the result is reproducible.

    Args:
        base: samples of each earlier build. No build has an empty list, and the median of all samples is positive. The
            bootstrap resamples the builds first, and then the samples of each chosen build.
        samples: samples of the new build.
    """
    random = np.random.default_rng(_SEED)
    new = np.asarray(samples, dtype=float)
    resampled = _medians(new[random.integers(len(new), size=(RESAMPLES, len(new)))])
    ratios = resampled / _resampled_medians([np.asarray(build, dtype=float) for build in base], random)
    tail, outer = (1 - CONFIDENCE) / 2, (1 - CONFIRMING_CONFIDENCE) / 2
    lowest, low, high, highest = np.quantile(ratios, (outer, tail, 1 - tail, 1 - outer))
    sure = bool(lowest > 1 or highest < 1)
    return Interval(median(samples) / median(chain(*base)), float(low), float(high), sure)


def _resampled_medians(builds: list[np.ndarray], random: np.random.Generator) -> np.ndarray:
    sizes = np.array([len(build) for build in builds])
    padded = np.zeros((len(builds), sizes.max()))
    for row, build in zip(padded, builds, strict=True):
        row[: len(build)] = build
    chosen = random.integers(len(builds), size=(RESAMPLES, len(builds), 1))
    places = random.random((RESAMPLES, len(builds), sizes.max())) * sizes[chosen]
    medians = _medians(padded[chosen, places.astype(int)].reshape(RESAMPLES, -1))
    return np.maximum(medians, np.finfo(float).tiny)


def _medians(rows: np.ndarray) -> np.ndarray:
    """Return the median of each row.

    For many short rows, sorting is faster than `numpy.median`.
    """
    ordered = np.sort(rows, axis=1)
    last = rows.shape[1] - 1
    return (ordered[:, last // 2] + ordered[:, (last + 1) // 2]) / 2


# Penalty of a segment, in units of scatter times log(series length). BIC uses 1. A higher penalty avoids false change
# points.
_PENALTY = 3.0
# Lower bound of the estimated scatter. The estimate can be too small by chance, for example if the medians of two
# builds are equal.
_LEAST_SCALE = 0.005
# Lower bound of the values before the logarithm, because 0 has no logarithm.
_LEAST_VALUE = 1e-6
# Ratio of the median absolute difference of two normal values to the mean absolute deviation of one value.
_NEIGHBORS = 1.196


@dataclass(frozen=True)
class Level:
    """Consecutive builds with the same fitted value: index `start` to `end` - 1."""

    start: int
    end: int
    value: float


def levels(values: Sequence[float]) -> list[Level]:
    """Return the segments of a piecewise constant fit of `values`, oldest first.

    An empty series has no segments.

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
    """Estimate the mean absolute deviation of values from their segment's level.

    The segments are not known yet, so the estimate uses the differences of adjacent values.
    """
    if len(logs) < 2:
        return _LEAST_SCALE
    return max(_LEAST_SCALE, float(np.median(np.abs(np.diff(logs)))) / _NEIGHBORS)


def _segment_costs(logs: np.ndarray) -> np.ndarray:
    """Return a matrix of fitting errors.

    Entry `[first, last]` is the error of the segment from `first` to `last`.

    The error is the sum of absolute deviations from the segment's median. Entries with `last` < `first` are inf.
    """
    count = len(logs)
    costs = np.full((count, count), np.inf)
    for first in range(count):
        ordered: list[float] = []
        cost = 0.0
        for last, value in enumerate(logs[first:].tolist(), first):
            if ordered:
                # The cost grows by the distance of `value` from the interval between the two middle values.
                low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
                cost += max(low - value, value - high, 0.0)
            insort(ordered, value)
            costs[first, last] = cost
    return costs
