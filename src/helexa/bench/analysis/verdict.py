"""Whether a build is slower or faster than those before it: a bootstrapped ratio of medians, and the least that counts.

Two things have to hold for a change. The confidence interval of the ratio excludes 1, with the scatter inside of builds
and the one between them both resampled. And the ratio is further from 1 than anything that happens without a reason:
3 %, or twice what unchanged builds are usually apart, whichever is more.
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
CONFIRMING_CONFIDENCE = 0.98  # of an alert: each build has many cells, and each of them a chance to be wrong
RESAMPLES = 2000
_SEED = 20_260_613


@dataclass(frozen=True)
class Interval:
    """A ratio of medians and its confidence interval.

    Attributes:
        sure: an interval of `CONFIRMING_CONFIDENCE` excludes 1, too.
    """

    ratio: float
    low: float
    high: float
    sure: bool

    def excludes_one(self) -> bool:
        """Whether the two medians differ beyond their scatter."""
        return self.low > 1 or self.high < 1


@dataclass(frozen=True)
class Verdict:
    """What is said of one metric of one build.

    Attributes:
        state: the verdict.
        interval: new median to trailing median; None where there are too few samples.
        threshold: the least relative change that counts.
        samples: of the new build.
        trailing_samples: of the builds before it.
        trailing_builds: how many of those there are.
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
    """Compare a build's samples with those of the builds before it.

    Args:
        history: samples of each earlier build, oldest first, none of them empty or negative. The last five make the
            comparison, all of them say what unchanged builds are apart.
        samples: of the build in question.
        better: which direction is an improvement.
        known: a change at this place of the history is known, so nothing before it is compared with.
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
    """Whether samples that were taken because of a verdict say the same by themselves.

    Of many builds that did not change, those are suspected whose first samples happened to be slow: these samples
    cannot confirm what they suggested.

    Args:
        verdict: from all samples together.
        first: what raised the suspicion; with `extra`, all samples.
        extra: taken since.
    """
    if verdict.state not in ("regressed", "improved") or verdict.interval is None or not len(extra):
        return False
    base = median([*first, *extra]) / verdict.interval.ratio
    ratio = median(extra) / base
    return verdict.interval.sure and abs(ratio - 1) > verdict.threshold and (ratio > 1) == (verdict.interval.ratio > 1)


def least_effect(history: Sequence[Sequence[float]], min_effect: float = MIN_EFFECT) -> float:
    """The smallest relative change that counts after these builds.

    The median absolute deviation is taken from neighbours, between which few changes lie: a change of the level long
    ago makes nobody blind to the next one.
    """
    medians = np.array([median(build) for build in history])
    if len(medians) < 2 or not (medians > 0).all():
        return min_effect
    deviation = float(np.median(np.abs(np.diff(np.log(medians))))) / np.sqrt(2)
    return max(min_effect, MAD_FACTOR * float(deviation))


def median_ratio(base: Sequence[Sequence[float]], samples: Sequence[float]) -> Interval:
    """The ratio of the median of `samples` to that of all of `base`, with a seeded bootstrap's interval.

    Args:
        base: samples of each build that is compared with, none of them empty; builds are resampled, then their samples.
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
    """The median of each row; sorting beats numpy's own median where rows are short and many."""
    ordered = np.sort(rows, axis=1)
    last = rows.shape[1] - 1
    return (ordered[:, last // 2] + ordered[:, (last + 1) // 2]) / 2
