"""Prompt tokens beside decoding: as many as a step has time for."""

import pytest

from helexa.neuron.engine.pace import Pace

ROWS = 8


def room(pace: Pace) -> int:
    """Of a step in which all that are here decode already."""
    return pace.room(ROWS, ROWS)


def after(most: int, decode: float, token: float, steps: int = 60) -> Pace:
    """A pace that has seen steps of so many seconds for decoding and for each prompt token."""
    pace = Pace(most)
    for _ in range(steps):
        pace.learn(ROWS, 0, decode)
        pace.learn(ROWS, room(pace), decode + room(pace) * token)
    return pace


def test_a_step_takes_twice_as_long_as_one_without_prompts() -> None:
    assert 19 <= room(after(most=128, decode=0.010, token=0.0005)) <= 20


def test_slow_tokens_still_go_on_and_quick_ones_are_bounded() -> None:
    assert room(after(most=128, decode=0.010, token=0.1)) == 8
    assert room(after(most=128, decode=0.010, token=1e-6)) == 128
    assert room(after(most=4, decode=0.010, token=0.1)) == 4


def test_it_follows_a_prompt_into_the_depth() -> None:
    pace = after(most=128, decode=0.010, token=0.0003)
    shallow = room(pace)
    for _ in range(30):
        pace.learn(ROWS, room(pace), 0.010 + room(pace) * 0.0010)
    assert room(pace) < shallow / 2


def test_now_and_then_a_step_shows_what_decoding_takes() -> None:
    pace = after(most=128, decode=0.010, token=0.0005)
    rooms: list[int] = []
    for _ in range(200):  # decoding takes four times as long now
        rooms.append(room(pace))
        pace.learn(ROWS, rooms[-1], 0.040 + rooms[-1] * 0.0005)
    assert 3 <= rooms.count(0) <= 8
    assert rooms[-1] > 2 * rooms[0]


def test_the_measure_is_a_step_of_all_that_are_here() -> None:
    pace = Pace(512)
    for rows in (1, 2, 4, 8) * 20:
        pace.learn(rows, 0, 0.010 + rows * 0.001)
        pace.learn(rows, 20, 0.010 + rows * 0.001 + 20 * 0.0005)
    assert pace.room(8, 8) == pytest.approx(36, abs=1)
    assert pace.room(8, 32) == pytest.approx((2 * 0.042 - 0.018) / 0.0005, abs=2)


def test_a_share_of_a_step_is_so_many_tokens() -> None:
    assert after(most=128, decode=0.010, token=0.0001).beside(0.6) == pytest.approx(60, abs=1)


def test_nothing_is_known_at_first() -> None:
    pace = Pace(128)
    assert (room(pace), pace.beside(0.6)) == (32, 0)
    pace.learn(ROWS, 16, 1.0)  # what decoding takes is not known
    assert (room(pace), pace.beside(0.6)) == (32, 0)
