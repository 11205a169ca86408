"""The command `neuron smoke`: tests whether this machine can divide a model among several processes (ranks).

The test verifies and times the exchanges between the ranks, compares the tokens of several ranks with those of one
rank, and kills a rank to see that the engine ends and starts again.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from helexa.core.errors import HelexaError
from helexa.core.fleet import ModelSpec
from helexa.core.source import ModelSource
from helexa.neuron.builtin_models import source_text
from helexa.neuron.config import NeuronConfig
from helexa.neuron.engine.ipc.collective_result import CollectiveResult
from helexa.neuron.engine.ipc.environment import ENVIRONMENT
from helexa.neuron.engine.ipc.messages import EngineOptions, SamplingParams
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.sources.sources import Sources

_CHECK_SECONDS = 300
_DEATH_SECONDS = 60.0
_TOKENS = 16
_PROMPT = list(range(20, 60))  # ids that every vocabulary has


async def smoke(config: NeuronConfig, model: str, ranks: int, report: Callable[[str], None]) -> None:
    """Run the test and report each result as a line of text.

    Args:
        model: id, source or path of the model.
        ranks: number of ranks.
        report: called with each line.

    Raises:
        HelexaError: a part of the test failed; the message says which.
    """
    results = await asyncio.to_thread(_check_collectives, ranks)
    for result in results:
        timing = "" if result.median_us is None else f" median_us={result.median_us:.1f}"
        verified = "yes" if result.verified else "no"
        transport = result.transport.replace(" ", "_")
        report(f"{result.operation} transport={transport} bytes={result.size} verified={verified}{timing}")
    if wrong := next((result for result in results if not result.verified), None):
        raise HelexaError(f"{wrong.operation} over {wrong.transport} returned wrong numbers")
    source = ModelSource.parse(source_text(ModelSpec(model_id=model)), config.harness.torch.default_source)
    path = await Sources(config).resolve(source, quant=None, progress=lambda *_: None)
    options = config.harness.torch.engine_options("cpu")
    options = msgspec.structs.replace(options, kv_cache_mb=64, tensor_parallel_mode="exact")
    expected = await _tokens_of_engine(path, options, 1)
    tokens = await _tokens_of_engine(path, options, ranks)
    report(f"tokens ranks={ranks} count={len(tokens)} equal_to_one_rank={'yes' if tokens == expected else 'no'}")
    if tokens != expected:
        raise HelexaError(f"the tokens of {ranks} ranks differ from those of one rank: {tokens}, not {expected}")
    detected = await _kill_rank(path, options, ranks)
    begin = time.monotonic()
    tokens = await _tokens_of_engine(path, options, ranks)
    seconds = time.monotonic() - begin
    if tokens != expected:
        raise HelexaError(f"the tokens after a restart are {tokens}, not {expected}")
    report(f"killed rank={ranks - 1} engine_ended_after_ms={detected * 1e3:.0f} back_after_s={seconds:.1f}")


def _check_collectives(ranks: int) -> list[CollectiveResult]:
    command = [sys.executable, "-P", "-m", "helexa.neuron.engine.ranks.collective_check", str(ranks)]
    try:
        run = subprocess.run(
            command, env=ENVIRONMENT | os.environ, capture_output=True, text=True, check=False, timeout=_CHECK_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise HelexaError(f"the ranks did not meet within {_CHECK_SECONDS} s") from None
    if run.returncode:
        lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
        raise HelexaError(f"the exchange between the ranks failed: {lines[-1]}")
    return msgspec.json.decode(run.stdout, type=list[CollectiveResult])


async def _start(path: Path, options: EngineOptions, ranks: int, on_exit: Callable[[str], None]) -> EngineClient:
    options = msgspec.structs.replace(options, tensor_parallel=ranks)
    return await EngineClient.start(path, options, on_exit=on_exit)


async def _tokens_of_engine(path: Path, options: EngineOptions, ranks: int) -> list[int]:
    """Start an engine with `ranks` ranks, let it generate tokens by greedy sampling, and return the tokens."""
    client = await _start(path, options, ranks, lambda reason: None)
    try:
        stream = client.generate(_PROMPT, max_tokens=_TOKENS, sampling=SamplingParams(temperature=0))
        outputs = [output async for output in stream]
    finally:
        await client.close()
    if (error := outputs[-1].error) is not None:
        raise HelexaError(error)
    return [token for output in outputs for token in output.tokens]


async def _kill_rank(path: Path, options: EngineOptions, ranks: int) -> float:
    """Kill the last rank of an engine that generates tokens; return the seconds until the engine has ended.

    Raises:
        HelexaError: the engine or one of its processes still runs after `_DEATH_SECONDS`.
    """
    died = asyncio.Event()
    client = await _start(path, options, ranks, lambda reason: died.set())
    try:
        processes = [psutil.Process(client.pid), *psutil.Process(client.pid).children()]
        stream = client.generate(_PROMPT, max_tokens=4096, sampling=SamplingParams(temperature=0))
        await anext(stream)
        begin = time.monotonic()
        processes[-1].send_signal(signal.SIGKILL)
        try:
            await asyncio.wait_for(died.wait(), _DEATH_SECONDS)
        except TimeoutError:
            raise HelexaError(
                f"the engine still runs {_DEATH_SECONDS:.0f} s after rank {ranks - 1} was killed"
            ) from None
        seconds = time.monotonic() - begin
        await stream.aclose()
    finally:
        await client.close()
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, _DEATH_SECONDS)
    if alive:
        raise HelexaError(f"processes of the engine still run: {', '.join(str(process.pid) for process in alive)}")
    return seconds
