"""Run all checks of `neuron doctor` and print their results (findings) as text or JSON."""

import json
from collections.abc import Iterable, Iterator

from helexa.neuron.cache_folder import cache_root
from helexa.neuron.config import NeuronConfig
from helexa.neuron.doctor.check_result import CheckResult
from helexa.neuron.doctor.folder import look_at_folder
from helexa.neuron.doctor.hubs import look_at_hubs
from helexa.neuron.doctor.kernels import look_at_kernels
from helexa.neuron.doctor.links import look_at_links
from helexa.neuron.doctor.machine import look_at_machine
from helexa.neuron.doctor.port import look_at_port
from helexa.neuron.hardware.discovery import default_device
from helexa.neuron.server.access import exposure

_MARKS = {"fine": "", "note": "note: ", "fault": "FAULT: "}


def examine(settings: NeuronConfig) -> Iterator[CheckResult]:
    """Run all checks that `neuron doctor` reports, and yield the result of each check as soon as it is known."""
    device = settings.harness.torch.device
    yield from examine_machine(settings, default_device() if device == "auto" else device)
    models = ", ".join(spec.model_id for spec in settings.default_models)
    yield CheckResult("models", "fine", f"loaded at start: {models or 'nothing'}")
    yield look_at_port(settings.host, settings.port)
    if (exposed := exposure(settings)) is not None:
        yield CheckResult("exposure", "note", exposed)


def examine_machine(settings: NeuronConfig, device: str, why: str = "") -> Iterator[CheckResult]:
    """Check what models need in order to run on this machine: hardware, kernels, cache folder and model hubs.

    The node's port and its access from other machines are not checked.

    Args:
        settings: the node's configuration.
        device: torch name of the device on which the models run, for example `cuda:0`.
        why: reason for the choice of `device`, for the printed text; may be empty.
    """
    torch = settings.harness.torch
    yield from look_at_machine(torch.device)
    yield from look_at_kernels(torch, device, why)
    yield from look_at_links(device, torch.tensor_parallel)
    yield from look_at_folder(cache_root(settings.cache.dir), "model files, compiled kernels and packed weights")
    yield from look_at_hubs(settings)


def report(checks: Iterable[CheckResult], *, as_json: bool) -> bool:
    """Print the findings. Return True if none of them has the level `fault`.

    Text lines are printed one by one as the checks finish. JSON is printed after the last check.
    """
    results: list[CheckResult] = []
    for result in checks:
        results.append(result)
        if not as_json:
            print(f"{_MARKS[result.level]}{result.text}", flush=True)
    healthy = all(result.level != "fault" for result in results)
    if as_json:
        print(json.dumps({"healthy": healthy, "findings": [result._asdict() for result in results]}, indent=2))
    return healthy
