"""Change points: the levels of a series of measurements."""

import itertools
import random

import pytest

from helexa.bench.verdicts_and_change_points import levels


def bounds(values):
    return [(level.start, level.end) for level in levels(values)]


def noisy(rng, level, count, spread=0.01):
    return [level * rng.gauss(1, spread) for _ in range(count)]


def test_change_point_detection_locates_a_level_shift():
    rng = random.Random(1)
    segments = levels(noisy(rng, 100, 20) + noisy(rng, 92, 15) + noisy(rng, 100, 10))
    assert [(level.start, level.end) for level in segments] == [(0, 20), (20, 35), (35, 45)]
    assert [level.value for level in segments] == pytest.approx([100, 92, 100], rel=0.01)


def test_noise_and_a_single_outlier_are_not_detected_as_a_shift():
    rng = random.Random(2)
    values = noisy(rng, 50, 100)
    assert bounds(values) == [(0, 100)]
    values[40] *= 1.1
    assert bounds(values) == [(0, 100)]


def test_detected_levels_cover_the_whole_series_and_a_large_shift_begins_a_new_level():
    rng = random.Random(3)
    for _ in range(20):
        values = noisy(rng, 10, 4, 0.05) + noisy(rng, 13, 4, 0.05)
        segments = bounds(values)
        assert segments[0][0] == 0 and segments[-1][1] == len(values)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(segments))
        assert (0, 4) in segments


def test_series_of_constant_values_has_one_level():
    assert levels([]) == []
    assert bounds([3.0]) == [(0, 1)]
    assert bounds([0.0, 0.0, 0.0]) == [(0, 3)]
    assert bounds([5.0] * 200) == [(0, 200)]
    assert bounds([5.0] * 10 + [0.0] * 10) == [(0, 10), (10, 20)]
