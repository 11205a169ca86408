"""A deadline that is moved."""

import asyncio
from typing import Any

from helexa.http.connections.deadline import Alarm


async def test_an_alarm_rings_once_at_the_last_time_that_was_set() -> None:
    loop, rung = asyncio.get_running_loop(), asyncio.Event()
    faults: list[Any] = []
    loop.set_exception_handler(lambda _, fault: faults.append(fault))
    times: dict[str, list[float]] = {name: [] for name in ("earlier", "later", "cleared", "stopped")}
    alarms = {name: Alarm(loop, lambda name=name: times[name].append(loop.time())) for name in times}
    begun = loop.time()
    for alarm in alarms.values():
        alarm.set(0.02)
    alarms["earlier"].set(0.01)
    alarms["later"].set(0.1)
    alarms["cleared"].clear()
    alarms["stopped"].stop()
    Alarm(loop, rung.set).set(0.2)
    await rung.wait()
    assert {name: len(rings) for name, rings in times.items()} == {"earlier": 1, "later": 1, "cleared": 0, "stopped": 0}
    assert times["earlier"][0] < times["later"][0]
    assert times["later"][0] >= begun + 0.1 - 0.002
    assert not faults
