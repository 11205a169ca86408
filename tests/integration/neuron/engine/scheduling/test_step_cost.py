"""The step cost model: linear in decode rows, plus the cost of prompt tokens."""

import pytest

from helexa.neuron.engine.scheduling.step_limits_and_fair_share import StepCost


def test_cost_of_a_row_is_estimated_after_steps_of_different_sizes() -> None:
    cost = StepCost()
    assert cost.decode(2) is None
    for _ in range(10):
        cost.learn(64, 0, 0.138)
        assert not cost.knows_rows
        assert cost.decode(2) == pytest.approx(0.138)  # the average of all steps
    cost.learn(4, 0, 0.018)
    assert cost.knows_rows
    assert cost.decode(2) == pytest.approx(0.014)
    assert cost.rows(0.030) == pytest.approx(10)


def test_step_time_outlier_counts_as_at_most_three_times_the_expected_seconds() -> None:
    cost = StepCost()
    for rows in (64, 4) * 5:
        cost.learn(rows, 0, 0.010 + 0.002 * rows)
    cost.learn(4, 0, 60.0)  # for example, the machine was suspended
    assert (cost.decode(4) or 0) < 3 * 0.018


def test_number_of_rows_is_unlimited_if_rows_add_no_time() -> None:
    cost = StepCost()
    for rows in (64, 4) * 5:
        cost.learn(rows, 0, 0.010)
    assert cost.rows(0.020) == float("inf")


def test_estimated_cost_of_a_prompt_token_is_its_time_beyond_a_decode_step() -> None:
    cost = StepCost()
    cost.learn(8, 16, 1.0)  # no decode-only step was measured yet
    assert cost.token is None
    cost.learn(8, 0, 0.010)
    cost.learn(8, 16, 0.018)
    assert cost.token == pytest.approx(0.0005)
    cost.learn(8, 16, 0.005)  # faster than a decode-only step
    assert cost.token == pytest.approx(0.75 * 0.0005)


def test_worst_time_per_token_is_the_maximum_of_the_last_four_large_steps() -> None:
    cost = StepCost(token_seconds=0.5)
    assert cost.worst_token == 0.5
    cost.learn_worst(100, 1.0)
    assert cost.worst_token == 0.01  # replaces the initial estimate
    cost.learn_worst(100, 3.0)
    for _ in range(3):
        cost.learn_worst(100, 1.0)
        assert cost.worst_token == 0.03
    cost.learn_worst(100, 1.0)
    assert cost.worst_token == 0.01
