"""The end of an engine process, with child processes that only sleep."""

import os
import signal
import sys
from collections.abc import AsyncIterator

import psutil
import pytest

from helexa.neuron.engine_client.child import Child


@pytest.fixture
async def child() -> AsyncIterator[Child]:
    child = await Child.spawn((sys.executable, "-c", "import signal; signal.pause()"))
    yield child
    await child.end(grace=0.0)


async def test_end_kills_the_process(child: Child):
    assert child.alive
    await child.end(grace=0.0)
    assert not child.alive
    assert not psutil.pid_exists(child.pid)
    assert "was ended by SIG" in child.ending()


async def test_ended_process_id_gets_no_signal(child: Child, monkeypatch: pytest.MonkeyPatch):
    await child.end(grace=0.0)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: sent.append((group, number)))
    await child.end(grace=0.0)
    child.signal(signal.SIGKILL)
    assert sent == []
