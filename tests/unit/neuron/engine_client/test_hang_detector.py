"""The watchdog: how long an engine with work may make no progress."""

import pytest

from helexa.neuron.engine_client.watchdog import HangDetector


def limits(detector: HangDetector, checks: list[tuple[int, bool]], expected: float, idle: float) -> list[float]:
    """Return the exceeded limits of the checks, and 0 for checks after which the engine may still work."""
    return [
        (detector.is_silent(news, working) and detector.hangs_after(expected, idle)) or 0.0 for news, working in checks
    ]


@pytest.mark.parametrize(
    ("checks", "hangs"),
    [
        ([(0, True)] * 9, False),
        ([(0, True)] * 10, True),
        ([(0, False)] * 30, False),
        ([(0, True)] * 9 + [(1, True)] * 9, False),
        ([(5, True)] * 9 + [(5, False)] + [(5, True)] * 8, False),
    ],
    ids=["before the limit", "limit", "idle", "news", "work ended"],
)
def test_engine_with_work_and_no_heartbeat_is_reported_as_hung_after_the_limit(
    checks: list[tuple[int, bool]], hangs: bool
):
    found = limits(HangDetector(2.0), checks, expected=0.0, idle=0.25)
    assert found == [0.0] * (len(checks) - 1) + [2.0 * hangs]


def test_checks_of_the_hang_detector_are_at_most_a_second_apart():
    assert HangDetector(2.0).check_seconds == 0.25
    assert HangDetector(120.0).check_seconds == 1.0


@pytest.mark.parametrize(
    ("expected", "limit"),
    [(0.01, 5.0), (2.0, 20.0), (100.0, 120.0), (0.0, 120.0)],
    ids=["floor", "ten times", "ceiling", "unknown"],
)
def test_hang_limit_of_a_step_follows_its_expected_duration(expected: float, limit: float):
    """The first two checks find progress. The limit is exceeded only after `limit` further checks, a second apart."""
    checks = [(1, True)] + [(2, True)] * 200
    found = limits(HangDetector(120.0), checks, expected, idle=1.0)
    first = next(index for index, exceeded in enumerate(found) if exceeded)
    assert found[first] == limit
    assert first == 1 + limit + (limit == 120.0)


def test_short_hang_limit_counts_only_time_in_which_the_engine_sleeps():
    checks = [(1, True)] * 60
    assert not any(limits(HangDetector(120.0), checks, expected=0.1, idle=0.0))
    found = limits(HangDetector(120.0), checks, expected=0.1, idle=0.25)
    assert found.index(5.0) == 20


def test_idle_time_before_the_current_step_does_not_count_for_the_hang_limit():
    detector = HangDetector(120.0)
    assert not any(limits(detector, [(1, True)] * 5, expected=0.1, idle=1.0))
    assert not any(limits(detector, [(1, True)] * 3, expected=0.0, idle=1.0))
    assert not any(limits(detector, [(1, True)] * 4, expected=0.1, idle=1.0))
    assert limits(detector, [(1, True)], expected=0.1, idle=1.0) == [5.0]
