"""Engine processes that are started ahead: real ones that hold no model."""

import os
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine_client.child import Child
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.engine_client.warm_standby import WarmStandby
from neuron.fake_models import ENGINE, make_model, starts


@pytest.fixture
async def spare() -> AsyncIterator[WarmStandby]:
    spare = WarmStandby(partial(Child.spawn, ENGINE))
    yield spare
    await spare.close()


def engines() -> set[int]:
    return {child.pid for child in psutil.Process().children() if ENGINE[-1] in child.cmdline()}


async def test_a_process_that_was_begun_loads_whatever_comes_first(spare: WarmStandby, tmp_path: Path):
    before = engines()
    await spare.begin()
    await spare.begin()
    (begun,) = engines() - before
    model = make_model(tmp_path)
    for expected in (True, False):
        client = await EngineClient.start(model, EngineOptions(), spawn=spare.take)
        assert (client._child.pid == begun) == expected
        await client.close()
    assert starts(model) == 2
    assert engines() == before


async def test_one_that_has_died_meanwhile_is_replaced(spare: WarmStandby):
    before = engines()
    await spare.begin()
    (begun,) = engines() - before
    os.kill(begun, signal.SIGKILL)
    psutil.Process(begun).wait(20)
    child = await spare.take()
    assert child.alive
    await child.end(grace=0.0)


async def test_one_that_nobody_takes_is_ended(spare: WarmStandby):
    before = engines()
    await spare.begin()
    await spare.close()
    await spare.close()
    assert engines() == before


async def test_an_engine_that_is_never_told_what_to_load_ends_with_its_socket():
    child = await Child.spawn()
    child.writer.close()
    await child.wait(60)
    assert child.ending() == "the engine process ended with exit code 0"
    await child.end(grace=0.0)
