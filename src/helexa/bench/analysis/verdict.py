"""Verdict on a build against earlier builds, from the bootstrapped ratio of medians.

A change requires two conditions:

* The confidence interval of the ratio excludes 1. The bootstrap resamples builds and their samples.
* The ratio differs from 1 by more than a threshold: 3 %, or twice the usual difference of unchanged builds if larger.
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
CONFIRMING_CONFIDENCE = 0.98  # for alerts: each build has many cells, so false alarms add up
RESAMPLES = 2000
_SEED = 20_260_613


@dataclass(frozen=True)
class Interval:
    """A ratio of medians and its confidence interval.

    Attributes:
        ratio: the ratio.
        low: lower bound at `CONFIDENCE`.
        high: upper bound at `CONFIDENCE`.
        sure: whether the interval at `CONFIRMING_CONFIDENCE` also excludes 1.
    """

    ratio: float
    low: float
    high: float
    sure: bool

    def excludes_one(self) -> bool:
        """Return whether the interval excludes 1."""
        return self.low > 1 or self.high < 1


@dataclass(frozen=True)
class Verdict:
    """The verdict on one metric of one build.

    Attributes:
        state: the verdict.
        interval: ratio of the new median to the trailing median, or None for too few samples.
        threshold: smallest relative change that counts.
        samples: number of samples of the new build.
        trailing_samples: number of samples of the compared builds.
        trailing_builds: number of compared builds.
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
    """Compare a build's samples with the samples of earlier builds.

    Args:
        history: non-empty lists of non-negative samples of each earlier build, oldest first. The comparison uses the
            last five builds, the threshold uses all builds.
        samples: samples of the new build.
        better: direction of an improvement.
        known: index in `history` of a known change; earlier builds are not compared.
        min_effect: smallest relative change that counts.
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
    """Return whether the extra samples alone confirm a verdict.

    A suspicion selects builds whose first samples happened to be slow, so the first samples cannot confirm it.

    Args:
        verdict: verdict on all samples.
        first: samples that raised the suspicion; `first` and `extra` are all samples.
        extra: samples taken after the suspicion.
    """
    if verdict.state not in ("regressed", "improved") or verdict.interval is None or not len(extra):
        return False
    base = median([*first, *extra]) / verdict.interval.ratio
    ratio = median(extra) / base
    return verdict.interval.sure and abs(ratio - 1) > verdict.threshold and (ratio > 1) == (verdict.interval.ratio > 1)


def least_effect(history: Sequence[Sequence[float]], min_effect: float = MIN_EFFECT) -> float:
    """Return the smallest relative change that counts after these builds.

    The deviation is estimated from differences of neighbors, so an old change of the level does not raise the
    threshold.
    """
    medians = np.array([median(build) for build in history])
    if len(medians) < 2 or not (medians > 0).all():
        return min_effect
    deviation = float(np.median(np.abs(np.diff(np.log(medians))))) / np.sqrt(2)
    return max(min_effect, MAD_FACTOR * float(deviation))


def median_ratio(base: Sequence[Sequence[float]], samples: Sequence[float]) -> Interval:
    """Return the ratio of the median of `samples` to the median of `base`, with a bootstrap interval of fixed seed.

    Args:
        base: non-empty samples of each compared build; the bootstrap resamples builds, then their samples.
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
    """Return the median of each row. Sorting is faster than numpy's median for many short rows."""
    ordered = np.sort(rows, axis=1)
    last = rows.shape[1] - 1
    return (ordered[:, last // 2] + ordered[:, (last + 1) // 2]) / 2
