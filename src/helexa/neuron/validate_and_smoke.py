"""The commands `neuron validate` and `neuron smoke`.

`validate` tests whether this machine serves a model: it reports the hardware and kernels like `neuron doctor`, loads a
model as a node does, and generates tokens. `smoke` tests whether this machine can divide a model by ranks: it verifies
and times the exchanges between the ranks, compares their tokens with those of one rank, and kills a rank to see that
the engine ends and starts again.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import psutil

from helexa.core.display import memory_text
from helexa.core.errors import HelexaError
from helexa.core.model_source_ids import ModelSource
from helexa.core.node_reports import ModelSpec
from helexa.neuron.builtin_models import source_text
from helexa.neuron.cache_folder import cache_root
from helexa.neuron.config import NeuronConfig
from helexa.neuron.doctor import look_at_folder
from helexa.neuron.doctor_machine import CheckResult, look_at_kernels, look_at_machine
from helexa.neuron.engine.ipc import ENVIRONMENT
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import CollectiveResult, SamplingParams
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.hardware.device_choice import default_device
from helexa.neuron.lifecycle.registry import Registry
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.sources.hubs_and_sources import Sources

_TOKENS = 16
_PROMPT = list(range(20, 60))  # arbitrary token ids, which every vocabulary has

_CHECK_SECONDS = 300
_DEATH_SECONDS = 60.0


async def validate(config: NeuronConfig, spec: ModelSpec) -> AsyncIterator[CheckResult]:
    """Run `neuron validate`: yield each check's result; a `fault` ends the test."""
    torch = config.harness.torch
    device = default_device() if torch.device == "auto" else torch.device
    checks = [*look_at_machine(torch.device)]
    if not _failed(checks):  # without a driver, the kernels' check would report the same fault again
        checks += look_at_kernels(torch, device, "")
    checks += look_at_folder(cache_root(config.cache.dir), "model files, compiled kernels and packed weights")
    for check in checks:
        yield check
    if _failed(checks):
        return
    registry = Registry(config, Sources(config), device=device)
    try:
        started = time.monotonic()
        model = await registry.load(spec)
        seconds = time.monotonic() - started
        for check in _describe_load(model, seconds):
            yield check
        yield await _generate(model)
    except HelexaError as error:
        yield CheckResult("load", "fault", f"{spec.model_id}: {error}")
    finally:
        await registry.close()


def _failed(checks: list[CheckResult]) -> bool:
    return any(check.level == "fault" for check in checks)


def _describe_load(model: ServedModel, seconds: float) -> list[CheckResult]:
    ready = model.engine.ready
    weights = memory_text(ready.weight_bytes >> 20)
    cache_tokens = ready.kv_pages * ready.page_size
    return [
        CheckResult("load", "fine", f"loaded {model.id} on {ready.device} in {ready.dtype} in {seconds:.1f} s"),
        CheckResult("memory", "fine", f"{weights} of weights; the KV cache holds {cache_tokens} tokens"),
    ]


async def _generate(model: ServedModel) -> CheckResult:
    """Generate tokens; return a `fault` if the engine reports an error."""
    started = time.monotonic()
    sampling = SamplingParams(temperature=0)
    outputs = [output async for output in model.engine.generate(_PROMPT, max_tokens=_TOKENS, sampling=sampling)]
    seconds = time.monotonic() - started
    if (error := outputs[-1].error) is not None:
        return CheckResult("tokens", "fault", error)
    count = sum(len(output.tokens) for output in outputs)
    return CheckResult("tokens", "fine", f"generated {count} tokens in {seconds:.2f} s")


async def smoke(config: NeuronConfig, model: str, ranks: int, report: Callable[[str], None]) -> None:
    """Run `neuron smoke`; call `report` with a line of text for each result.

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
        raise HelexaError(
            f"{wrong.operation} over {wrong.transport} returned wrong numbers; do not use tensor_parallel here"
        )
    source = ModelSource.parse(source_text(ModelSpec(model_id=model)), config.harness.torch.default_source)
    path = await Sources(config).resolve(source, quant=None, progress=lambda *_: None)
    options = config.harness.torch.engine_options("cpu")
    options = msgspec.structs.replace(options, kv_cache_mb=64, tensor_parallel_mode="exact")
    expected = await _tokens_of_engine(path, options, 1)
    tokens = await _tokens_of_engine(path, options, ranks)
    report(f"tokens ranks={ranks} count={len(tokens)} equal_to_one_rank={'yes' if tokens == expected else 'no'}")
    if tokens != expected:
        raise HelexaError(
            f"the tokens of {ranks} ranks differ from those of one rank: {tokens}, not {expected}; "
            "do not use tensor_parallel here"
        )
    detected = await _kill_rank(path, options, ranks)
    begin = time.monotonic()
    tokens = await _tokens_of_engine(path, options, ranks)
    seconds = time.monotonic() - begin
    if tokens != expected:
        raise HelexaError(f"the tokens after a restart are {tokens}, not {expected}; do not use tensor_parallel here")
    report(f"killed rank={ranks - 1} engine_ended_after_ms={detected * 1e3:.0f} back_after_s={seconds:.1f}")


def _check_collectives(ranks: int) -> list[CollectiveResult]:
    command = [sys.executable, "-P", "-m", "helexa.neuron.engine.ranks.collective_check", str(ranks)]
    try:
        run = subprocess.run(
            command, env=ENVIRONMENT | os.environ, capture_output=True, text=True, check=False, timeout=_CHECK_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise HelexaError(
            f"the {ranks} processes did not connect within {_CHECK_SECONDS} s; free CPUs, or try again"
        ) from None
    if run.returncode:
        lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
        raise HelexaError(f"the {ranks} processes cannot exchange data: {lines[-1]}; do not use tensor_parallel here")
    return msgspec.json.decode(run.stdout, type=list[CollectiveResult])


async def _start(path: Path, options: EngineOptions, ranks: int, on_exit: Callable[[str], None]) -> EngineClient:
    options = msgspec.structs.replace(options, tensor_parallel=ranks)
    return await EngineClient.start(path, options, on_exit=on_exit)


async def _tokens_of_engine(path: Path, options: EngineOptions, ranks: int) -> list[int]:
    """Return the tokens that an engine with `ranks` ranks generates greedily."""
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
    """Kill the last rank of an engine; return the seconds until the engine ends."""
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
                f"the engine still runs {_DEATH_SECONDS:.0f} s after one of its processes was killed; "
                "do not use tensor_parallel here"
            ) from None
        seconds = time.monotonic() - begin
        await stream.aclose()
    finally:
        await client.close()
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, _DEATH_SECONDS)
    if alive:
        pids = " ".join(str(process.pid) for process in alive)
        raise HelexaError(f"processes of the engine still run; kill them with `kill -9 {pids}`")
    return seconds
