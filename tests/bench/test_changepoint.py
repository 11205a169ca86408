"""Levels of a series."""

import itertools
import random

import pytest

from helexa.bench.analysis.changepoint import levels


def bounds(values):
    return [(level.start, level.end) for level in levels(values)]


def noisy(rng, level, count, spread=0.01):
    return [level * rng.gauss(1, spread) for _ in range(count)]


def test_a_step_is_found_where_it_is():
    rng = random.Random(1)
    found = levels(noisy(rng, 100, 20) + noisy(rng, 92, 15) + noisy(rng, 100, 10))
    assert [(level.start, level.end) for level in found] == [(0, 20), (20, 35), (35, 45)]
    assert [level.value for level in found] == pytest.approx([100, 92, 100], rel=0.01)


def test_scatter_and_one_outlier_are_no_change():
    rng = random.Random(2)
    values = noisy(rng, 50, 100)
    assert bounds(values) == [(0, 100)]
    values[40] *= 1.1
    assert bounds(values) == [(0, 100)]


def test_pieces_cover_the_series_and_a_large_step_is_in_all_of_them():
    rng = random.Random(3)
    for _ in range(20):
        values = noisy(rng, 10, 4, 0.05) + noisy(rng, 13, 4, 0.05)
        found = bounds(values)
        assert found[0][0] == 0 and found[-1][1] == len(values)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
        assert (0, 4) in found


def test_short_and_strange_series():
    assert levels([]) == []
    assert bounds([3.0]) == [(0, 1)]
    assert bounds([0.0, 0.0, 0.0]) == [(0, 3)]
    assert bounds([5.0] * 200) == [(0, 200)]
    assert bounds([5.0] * 10 + [0.0] * 10) == [(0, 10), (10, 20)]
