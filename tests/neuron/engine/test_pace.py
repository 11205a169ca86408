"""Prompt tokens beside decoding: as many as a step has time for."""

import pytest

from helexa.neuron.engine.pace import Pace


def after(most: int, decode: float, token: float, steps: int = 60) -> Pace:
    """A pace that has seen steps of so many seconds for decoding and for each prompt token."""
    pace = Pace(most)
    for _ in range(steps):
        pace.learn(0, decode)
        pace.learn(pace.room, decode + pace.room * token)
    return pace


def test_a_step_takes_twice_as_long_as_one_without_prompts() -> None:
    assert 19 <= after(most=128, decode=0.010, token=0.0005).room <= 20


def test_slow_tokens_still_go_on_and_quick_ones_are_bounded() -> None:
    assert after(most=128, decode=0.010, token=0.1).room == 8
    assert after(most=128, decode=0.010, token=1e-6).room == 128
    assert after(most=4, decode=0.010, token=0.1).room == 4


def test_it_follows_a_prompt_into_the_depth() -> None:
    pace = after(most=128, decode=0.010, token=0.0003)
    shallow = pace.room
    for _ in range(30):
        pace.learn(pace.room, 0.010 + pace.room * 0.0010)
    assert pace.room < shallow / 2


def test_a_share_of_a_step_is_so_many_tokens() -> None:
    assert after(most=128, decode=0.010, token=0.0001).beside(0.6) == pytest.approx(60, abs=1)


def test_nothing_is_known_at_first() -> None:
    pace = Pace(128)
    assert (pace.room, pace.beside(0.6)) == (32, 0)
    pace.learn(16, 1.0)  # what decoding takes is not known
    assert (pace.room, pace.beside(0.6)) == (32, 0)
