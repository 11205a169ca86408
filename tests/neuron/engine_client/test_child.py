"""An engine process and its end, with processes that do nothing."""

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


async def test_it_is_gone_when_it_was_ended(child: Child):
    assert child.alive
    await child.end(grace=0.0)
    assert not child.alive
    assert not psutil.pid_exists(child.pid)
    assert "was ended by SIG" in child.ending()


async def test_nothing_is_sent_to_a_number_that_may_be_somebody_elses(child: Child, monkeypatch: pytest.MonkeyPatch):
    await child.end(grace=0.0)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: sent.append((group, number)))
    await child.end(grace=0.0)
    child.signal(signal.SIGKILL)
    assert sent == []
