"""When a crashed engine is restarted."""

from helexa.neuron.lifecycle.restart_and_sleep import RestartLimiter


def test_pauses_before_engine_restarts_grow_until_the_restarts_are_exhausted():
    restarts = RestartLimiter(most=8, window=600)
    assert [restarts.next(now) for now in range(9)] == [0, 1, 2, 4, 8, 16, 30, 30, None]


def test_engine_restart_does_not_count_any_more_after_the_time_window():
    restarts = RestartLimiter(most=2, window=100)
    assert [restarts.next(now) for now in (0, 50, 100, 101, 102, 151)] == [0, 0, None, 0, None, 0]
    assert restarts.next(1000) == 0


def test_crashed_engine_that_ran_for_long_is_restarted_without_a_pause():
    restarts = RestartLimiter(most=20, window=600)
    assert [restarts.next(60.0 * minute) for minute in range(9)] == [0] * 9
    assert [restarts.next(now) for now in (490, 500, 540, 550)] == [1, 2, 0, 1]


def test_restart_limit_0_disables_engine_restarts():
    assert RestartLimiter(most=0, window=100).next(0) is None
