"""The end of an engine process, with child processes that only sleep."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from helexa.core.errors import HelexaError, ModelFileError
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.engine_client.process_and_standby import Child
from helexa.neuron.processes.stack_traces_and_exit_reasons import exit_reason
from http_listener import eventually

READS_A_TRUNCATED_FILE = """
import mmap, os, sys, tempfile
with tempfile.TemporaryFile() as file:
    file.truncate(4 * mmap.PAGESIZE)
    mapping = mmap.mmap(file.fileno(), 0)
    file.truncate(0)
    mapping[2 * mmap.PAGESIZE]
"""


@pytest.fixture
async def child() -> AsyncIterator[Child]:
    child = await Child.spawn((sys.executable, "-c", "import signal; signal.pause()"))
    yield child
    await child.end(grace=0.0)


async def test_ending_an_engine_process_kills_the_process(child: Child):
    assert child.alive
    await child.end(grace=0.0)
    assert not child.alive
    assert not psutil.pid_exists(child.pid)
    assert "was ended by SIG" in child.ending()


async def test_engine_process_that_cannot_start_is_an_error_with_the_reason():
    with pytest.raises(HelexaError, match="no engine process can start: No such file or directory"):
        await Child.spawn(("/no/such/program",))


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_canceled_start_of_an_engine_leaves_no_process(turns: int):
    before = {process.pid for process in psutil.Process().children()}
    start = asyncio.create_task(Child.spawn((sys.executable, "-c", "import signal; signal.pause()")))
    for _ in range(turns):
        await asyncio.sleep(0)  # a turn of the event loop
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert {process.pid for process in psutil.Process().children()} <= before


async def test_no_signal_is_sent_to_the_process_id_of_an_ended_engine(child: Child, monkeypatch: pytest.MonkeyPatch):
    await child.end(grace=0.0)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: sent.append((group, number)))
    await child.end(grace=0.0)
    child.signal(signal.SIGKILL)
    assert sent == []


@pytest.mark.parametrize("turns", range(1, 8))
async def test_second_call_to_end_a_child_process_completes_after_the_first_was_canceled(child: Child, turns: int):
    ending = asyncio.create_task(child.end(grace=0.0))
    for _ in range(turns):
        await asyncio.sleep(0)  # a turn of the event loop
    ending.cancel()
    await asyncio.wait([ending])
    await child.end(grace=0.0)
    assert not child.alive
    assert child.writer.is_closing()
    assert child._popen.stdin is not None
    assert child._popen.stdin.closed


async def test_canceled_end_closes_all_pipes_although_a_grandchild_keeps_one_open():
    child = await Child.spawn(("sh", "-c", "setsid sleep 600 & echo $! >&2; wait"))
    try:
        await eventually(lambda: child._last_line != "")
        ending = asyncio.create_task(child.end(grace=0.0))
        await eventually(lambda: child._ended)
        ending.cancel()
        await asyncio.wait([ending])
        assert child.writer.is_closing()
        assert child._stderr_transport.is_closing()
    finally:
        os.kill(int(child._last_line), signal.SIGKILL)
        await child.end(grace=0.0)


async def test_file_truncated_during_a_load_is_an_error_of_the_model_file(tmp_path: Path):
    async def spawn() -> Child:
        return await Child.spawn((sys.executable, "-c", READS_A_TRUNCATED_FILE))

    with pytest.raises(
        ModelFileError, match=r"or its packed weights \(see `helexa cache`\) was truncated while it was loaded"
    ):
        await EngineClient.start(tmp_path, EngineOptions(), spawn=spawn)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (3, "ended with exit code 3"),
        (-signal.SIGSEGV, "was ended by SIGSEGV"),
        (-signal.SIGKILL, "was ended by SIGKILL (out of memory?)"),
        (
            -signal.SIGBUS,
            "was ended by SIGBUS (was a file of the model or of its packed weights truncated while it was read?)",
        ),
        (-40, "was ended by signal 40"),
    ],
)
def test_reason_for_the_end_of_an_engine_names_the_signal_and_its_likely_cause(code: int, reason: str):
    assert exit_reason(code) == reason
