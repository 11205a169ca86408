"""Timers whose time is moved, cleared or stopped."""

import asyncio
from typing import Any

from helexa.http.idle_connections import DeadlineTimer


async def test_deadline_timer_fires_once_at_the_last_deadline_that_was_set() -> None:
    loop, last_fired = asyncio.get_running_loop(), asyncio.Event()
    errors: list[Any] = []
    loop.set_exception_handler(lambda _, error: errors.append(error))
    times: dict[str, list[float]] = {name: [] for name in ("earlier", "later", "cleared", "stopped")}
    timers = {name: DeadlineTimer(loop, lambda name=name: times[name].append(loop.time())) for name in times}
    started = loop.time()
    for timer in timers.values():
        timer.set(0.02)
    timers["earlier"].set(0.01)
    timers["later"].set(0.1)
    timers["cleared"].clear()
    timers["stopped"].stop()
    DeadlineTimer(loop, last_fired.set).set(0.2)
    await last_fired.wait()
    assert {name: len(fired) for name, fired in times.items()} == {"earlier": 1, "later": 1, "cleared": 0, "stopped": 0}
    assert times["earlier"][0] < times["later"][0]
    assert times["later"][0] >= started + 0.1 - 0.002
    assert not errors
