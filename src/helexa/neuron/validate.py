"""The command `neuron validate`: tests whether this machine serves a model, with its hardware, driver and memory.

The test reports the hardware and kernels like `neuron doctor`, loads a model as a node does, and generates tokens.
"""

import time
from collections.abc import AsyncIterator

from helexa.core.errors import HelexaError
from helexa.core.fleet import ModelSpec
from helexa.neuron.cache_folder import cache_root
from helexa.neuron.config import NeuronConfig
from helexa.neuron.doctor.check_result import CheckResult
from helexa.neuron.doctor.folder import look_at_folder
from helexa.neuron.doctor.kernels import look_at_kernels
from helexa.neuron.doctor.machine import look_at_machine
from helexa.neuron.engine.ipc.messages import SamplingParams
from helexa.neuron.hardware.discovery import default_device
from helexa.neuron.lifecycle.model import ServedModel
from helexa.neuron.lifecycle.registry import Registry
from helexa.neuron.sources.sources import Sources

_TOKENS = 16
_PROMPT = list(range(20, 60))  # ids that every vocabulary has


async def validate(config: NeuronConfig, spec: ModelSpec) -> AsyncIterator[CheckResult]:
    """Run the test and yield the result of each check. A result with the level `fault` ends the test.

    Args:
        config: the node's configuration.
        spec: the model to load, like a load request.
    """
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
    cache_tokens = ready.kv_pages * ready.page_size
    return [
        CheckResult("load", "fine", f"loaded {model.id} on {ready.device} in {ready.dtype} in {seconds:.1f} s"),
        CheckResult(
            "memory", "fine", f"{ready.weight_bytes >> 20} MiB of weights; the KV cache holds {cache_tokens} tokens"
        ),
    ]


async def _generate(model: ServedModel) -> CheckResult:
    """Generate tokens from a fixed prompt. Non-finite logits and engine errors are faults."""
    started = time.monotonic()
    sampling = SamplingParams(temperature=0)
    outputs = [output async for output in model.engine.generate(_PROMPT, max_tokens=_TOKENS, sampling=sampling)]
    seconds = time.monotonic() - started
    if (error := outputs[-1].error) is not None:
        return CheckResult("tokens", "fault", error)
    count = sum(len(output.tokens) for output in outputs)
    return CheckResult("tokens", "fine", f"generated {count} tokens in {seconds:.2f} s")
