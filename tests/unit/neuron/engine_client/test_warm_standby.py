"""Warm standby processes: real engine processes without a model."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.engine_client.process_and_standby import Child, WarmStandby
from http_listener import eventually
from neuron.fake_models import ENGINE, make_model, starts


@pytest.fixture
async def standby() -> AsyncIterator[WarmStandby]:
    standby = WarmStandby(partial(Child.spawn, ENGINE))
    yield standby
    await standby.close()


def engines() -> set[int]:
    return {child.pid for child in psutil.Process().children() if ENGINE[-1] in child.cmdline()}


async def begun(standby: WarmStandby, existing: set[int]) -> int:
    """Start a standby process, and return its pid as soon as it runs its program: a new process has its parent's."""
    await standby.begin()
    await eventually(lambda: engines() != existing)
    (pid,) = engines() - existing
    return pid


async def test_first_load_uses_the_standby_process(standby: WarmStandby, tmp_path: Path):
    existing = engines()
    pid = await begun(standby, existing)
    await standby.begin()
    model = make_model(tmp_path)
    for expected in (True, False):
        client = await EngineClient.start(model, EngineOptions(), spawn=standby.take)
        assert (client._child.pid == pid) == expected
        await client.close()
    assert starts(model) == 2
    assert engines() == existing


async def test_load_after_the_death_of_the_standby_process_starts_another(standby: WarmStandby):
    pid = await begun(standby, engines())
    dead = standby._child
    assert dead is not None
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not dead.alive)
    child = await standby.take()
    assert child.alive
    await child.end(grace=0.0)


async def test_standby_process_that_died_while_unused_is_replaced(standby: WarmStandby):
    pid = await begun(standby, engines())
    dead = standby._child
    assert dead is not None
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not dead.alive)
    assert await begun(standby, engines()) != pid


async def test_unused_standby_process_is_ended_by_close(standby: WarmStandby):
    existing = engines()
    await standby.begin()
    await standby.close()
    await standby.close()
    assert engines() == existing


@pytest.mark.parametrize("turns", range(1, 8))
async def test_close_after_a_canceled_close_ends_the_standby_process(standby: WarmStandby, turns: int):
    existing = engines()
    await standby.begin()
    child = standby._child
    assert child is not None
    closing = asyncio.create_task(standby.close())
    for _ in range(turns):
        await asyncio.sleep(0)  # a turn of the event loop
    closing.cancel()
    await asyncio.wait([closing])
    await standby.close()
    assert not child.alive
    assert child.writer.is_closing()
    assert engines() == existing


async def test_standby_engine_ends_when_its_socket_closes_before_a_load():
    child = await Child.spawn()
    child.writer.close()
    await child.wait(60)
    assert child.ending() == "the engine process ended with exit code 0"
    await child.end(grace=0.0)
