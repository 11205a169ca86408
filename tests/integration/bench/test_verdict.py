"""Verdicts on builds: slowdowns are reported, scatter is not."""

import json
from pathlib import Path

import numpy as np
import pytest

from helexa.bench.verdicts_and_change_points import MIN_EFFECT, confirms, judge, least_effect, median_ratio

STEADY = [[1.0, 1.01, 0.99, 1.005, 0.995]] * 6
SCATTER = json.loads((Path(__file__).parent / "unchanged_builds.json").read_text())
"""Samples of two servers whose build did not change, by server and metric."""


def samples(source: str, metric: str) -> np.ndarray:
    return np.array(SCATTER[source]["metrics"][metric])


def is_alert(history: list[list[float]], drawn: list[float]) -> bool:
    """Return whether eight samples of a build raise an alert: five for a suspicion, three more to confirm it."""
    first, extra = drawn[:5], drawn[5:]
    suspected = judge(history, first, "lower").state in ("regressed", "improved")
    return suspected and confirms(judge(history, drawn, "lower"), first, extra)


@pytest.mark.parametrize("source", ["scripted", "model"])
@pytest.mark.parametrize("metric", ["ttft_s", "tpot_s"])
@pytest.mark.parametrize("seed", [0, 1])
def test_200_unchanged_builds_raise_at_most_2_alerts(source, metric, seed):
    rng = np.random.default_rng(seed)
    history: list[list[float]] = []
    alerts = 0
    for _ in range(200):
        drawn = rng.choice(samples(source, metric), 8).tolist()
        alerts += is_alert(history, drawn)
        history.append(drawn[:5])
    assert alerts <= 2


def test_slowdown_of_8_percent_is_reported_within_8_samples():
    rng = np.random.default_rng(0)
    scatter = samples("scripted", "ttft_s")
    for _ in range(50):
        history = [rng.choice(scatter, 5).tolist() for _ in range(8)]
        assert is_alert(history, (rng.choice(scatter, 8) * 1.08).tolist())


@pytest.mark.parametrize(
    "factor, better, state",
    [
        (1.1, "lower", "regressed"),
        (1.1, "higher", "improved"),
        (0.9, "lower", "improved"),
        (0.9, "higher", "regressed"),
        (1.02, "lower", "same"),
        (1.0, "higher", "same"),
    ],
)
def test_verdict_follows_the_speed_ratio_and_whether_higher_values_are_better(factor, better, state):
    verdict = judge(STEADY, [value * factor for value in STEADY[0]], better)
    assert verdict.state == state
    assert verdict.interval and verdict.interval.low <= factor <= verdict.interval.high
    assert (verdict.samples, verdict.trailing_samples, verdict.trailing_builds) == (5, 25, 5)


def test_too_few_samples_get_no_verdict():
    assert judge(STEADY, [2.0] * 4, "lower").state == "too few"
    assert judge([], [1.0] * 5, "lower").state == "too few"
    assert judge([[1.0] * 4], [1.0] * 5, "lower").state == "too few"
    assert judge([[0.0] * 5], [1.0] * 5, "lower").interval is None


def test_verdicts_on_the_same_samples_are_equal():
    new = [1.1, 1.2, 1.0, 1.15, 1.05]
    assert judge(STEADY, new, "lower") == judge(STEADY, new, "lower")


def test_confidence_interval_of_equal_samples_contains_1_in_at_least_90_percent():
    """About 95 of 100 intervals of the ratio of two samples from one population contain 1."""
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(100):
        ratio = median_ratio([rng.normal(1, 0.05, 20).tolist() for _ in range(5)], rng.normal(1, 0.05, 20).tolist())
        covered += not ratio.excludes_one()
    assert covered >= 90


def test_threshold_for_a_regression_exceeds_the_scatter_between_unchanged_builds():
    restless = [[level] * 5 for level in (1.0, 1.1, 0.95, 1.08, 0.97, 1.06)]
    assert least_effect(restless) > 0.1
    assert judge(restless, [1.08] * 5, "lower").state == "same"


def test_earlier_level_change_does_not_raise_the_threshold_for_a_slowdown():
    assert least_effect(STEADY + [[2.0] * 5] * 6) == MIN_EFFECT


def test_build_at_an_already_reported_level_is_not_reported_again():
    slow = [value * 1.1 for value in STEADY[0]]
    history = [*STEADY, slow]
    assert judge(history, slow, "lower").state == "regressed"
    assert judge(history, slow, "lower", known=6).state == "same"
    assert judge(history, STEADY[0], "lower", known=6).state == "improved"


def test_suspected_regression_is_confirmed_only_by_further_samples():
    first, extra = [1.1] * 12, [1.0, 1.01, 0.99]
    verdict = judge(STEADY, first + extra, "lower")
    assert verdict.state == "regressed"
    assert not confirms(verdict, first, extra)
    assert confirms(judge(STEADY, first + [1.1] * 3, "lower"), first, [1.1] * 3)
    assert not confirms(judge(STEADY, STEADY[0], "lower"), STEADY[0], [1.5] * 3)
