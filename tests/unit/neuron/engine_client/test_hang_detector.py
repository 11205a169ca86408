"""The watchdog: the number of checks without news after which an engine counts as hung."""

import pytest

from helexa.neuron.engine_client.watchdog import HangDetector


@pytest.mark.parametrize(
    ("checks", "hangs"),
    [
        ([(0, True), (0, True), (0, True)], [False, False, False]),
        ([(0, True), (0, True), (0, True), (0, True)], [False, False, False, True]),
        ([(0, False)] * 9, [False] * 9),
        ([(0, True), (0, True), (0, True), (1, True), (1, True)], [False] * 5),
        ([(5, False), (5, True), (5, True), (5, False), (5, True), (5, True)], [False] * 6),
    ],
    ids=["three checks", "four checks", "idle", "news", "work ended"],
)
def test_working_engine_without_news_counts_as_hung(checks: list[tuple[int, bool]], hangs: list[bool]):
    detector = HangDetector(max_silent_checks=3)
    assert [detector.check(news, working) for news, working in checks] == hangs
