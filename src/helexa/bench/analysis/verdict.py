"""Decides whether a build is faster or slower than earlier builds.

The ratio is the median of the build divided by the median of the earlier builds. A build has changed if both conditions
hold:

* The confidence interval of the ratio excludes 1. A bootstrap computes the interval: it resamples the earlier builds,
  and then the samples of each build.
* The ratio differs from 1 by more than a threshold. The threshold is the larger of 3 % and twice the typical difference
  between unchanged builds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
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
        state: `improved`, `regressed`, `same`, or `too few` if there are too few samples for a comparison.
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
        known: index in `history` of the last confirmed change. Builds before this index are not compared.
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
    """Return whether a suspected change is confirmed by the samples that were taken after the suspicion.

    A change is suspected because the first samples were unusual, possibly by chance. The first samples therefore cannot
    confirm the change.

    Args:
        verdict: verdict on all samples of the build.
        first: samples from before the suspicion.
        extra: samples taken after the suspicion. `first` and `extra` together are all samples of the build.
    """
    if verdict.state not in ("regressed", "improved") or verdict.interval is None or not len(extra):
        return False
    base = median([*first, *extra]) / verdict.interval.ratio
    ratio = median(extra) / base
    return verdict.interval.sure and abs(ratio - 1) > verdict.threshold and (ratio > 1) == (verdict.interval.ratio > 1)


def least_effect(history: Sequence[Sequence[float]], min_effect: float = MIN_EFFECT) -> float:
    """Return the smallest relative change that counts as a change, given the samples of earlier builds.

    The result is the larger of `min_effect` and twice the typical deviation between builds. The deviation is estimated
    from the differences of adjacent builds, so a single change in the history barely raises the estimate.
    """
    medians = np.array([median(build) for build in history])
    if len(medians) < 2 or not (medians > 0).all():
        return min_effect
    deviation = float(np.median(np.abs(np.diff(np.log(medians))))) / np.sqrt(2)
    return max(min_effect, MAD_FACTOR * float(deviation))


def median_ratio(base: Sequence[Sequence[float]], samples: Sequence[float]) -> Interval:
    """Return the ratio of the median of `samples` to the median of `base`, with a bootstrap confidence interval.

    The bootstrap uses a fixed seed, so the result is reproducible.

    Args:
        base: samples of each earlier build. No build has an empty list. The bootstrap resamples the builds first, and
            then the samples of each chosen build.
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
    """Return the median of each row. For many short rows, sorting is faster than `numpy.median`."""
    ordered = np.sort(rows, axis=1)
    last = rows.shape[1] - 1
    return (ordered[:, last // 2] + ordered[:, (last + 1) // 2]) / 2
