"""A real engine process that is slow, stopped, or started with many open file descriptors."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from scheduler_runs import GREEDY

from descriptors import many_descriptors
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, TokenOutput
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.processes import heartbeat
from injection import inject

FRANCE = [504, 3575, 282, 4649, 314]  # "The capital of France is"


@asynccontextmanager
async def running(
    model: Path, step_seconds: float, on_exit: Callable[[str], Any] = lambda reason: None
) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(model, EngineOptions(kv_cache_mb=64), step_seconds=step_seconds, on_exit=on_exit)
    try:
        yield client
    finally:
        await client.close()


async def complete(client: EngineClient, max_tokens: int = 4) -> list[TokenOutput]:
    return [output async for output in client.generate(FRANCE, max_tokens=max_tokens, sampling=GREEDY)]


async def test_engine_with_slow_steps_that_makes_progress_is_not_killed(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
):
    inject(monkeypatch, "crawl@step=2")
    async with running(smollm2_gguf, step_seconds=1.5) as client:
        outputs = await complete(client)
        assert outputs[-1].finish == "length"
        assert sum(len(output.tokens) for output in outputs) == 4
        assert client.alive


async def test_stalled_kernel_ends_the_engine_before_the_configured_limit(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The limit follows the expected duration of the step. The log has the native stacks of the thread pool."""
    caplog.set_level("INFO")
    inject(monkeypatch, "stall@step=3")
    died = asyncio.get_running_loop().create_future()
    async with running(smollm2_gguf, step_seconds=3600, on_exit=died.set_result) as client:
        async with asyncio.timeout(300):
            outputs = await complete(client)
            assert (outputs[-1].finish, outputs[-1].retry) == ("error", True)
            assert (await died).startswith("the engine made no progress for ")
    assert "debug_fault.py" in caplog.text
    for function in ("run_graph", "pool_play", "meet_ranks", "pool_work"):
        assert f"({function}+" in caplog.text


def test_heartbeat_count_increases_at_every_layer_of_a_step_in_torch(runner: Runner):
    request = Generate(id=1, prompt=FRANCE, max_tokens=1, sampling=GREEDY)
    plan = [PlanEntry(Sequence(request, pages=[0], slot=0), len(FRANCE))]
    initial = heartbeat._Engine.counts[0]
    runner.launch(build_step(plan)).read()
    assert heartbeat._Engine.counts[0] - initial >= 29


async def test_engine_stopped_by_sigstop_is_killed(smollm2_gguf: Path):
    died = asyncio.get_running_loop().create_future()
    async with running(smollm2_gguf, step_seconds=1.5, on_exit=died.set_result) as client:
        stream = client.generate(FRANCE, max_tokens=4000, sampling=GREEDY)
        await anext(stream)
        os.kill(client.pid, signal.SIGSTOP)
        outputs = [output async for output in stream]
        assert (outputs[-1].finish, outputs[-1].retry) == ("error", True)
        assert await died == "the engine made no progress for 1.5 s and was killed"


async def test_engine_works_if_its_socket_descriptor_exceeds_1023(smollm2_gguf: Path):
    """The engine's socket has a descriptor above 1023, which `select` does not support."""
    with many_descriptors():
        async with running(smollm2_gguf, step_seconds=60) as client:
            assert (await complete(client))[-1].finish == "length"
