"""Check torch and the compute kernels that an inference engine would choose on each device.

A separate process imports torch, because a broken installation of torch may crash the process that imports it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec

from helexa.neuron.config import TorchConfig
from helexa.neuron.doctor.check_result import CheckResult
from helexa.neuron.doctor.compiled_modules import look_at_compiled_modules
from helexa.neuron.engine.ipc.environment import ENVIRONMENT
from helexa.neuron.hardware.discovery import torch_version

NO_KERNELS = "no"
"""Kernel name of an unusable device."""

_SURVEY_SECONDS = 300  # a slow disk delays the import of torch, and kernels may have to be compiled


class DeviceKernels(msgspec.Struct, frozen=True, kw_only=True):
    """The compute kernels that an engine would use on one device.

    Attributes:
        device: name of the device in torch, for example `cuda:0`.
        kernels: name of the set of kernels; `NO_KERNELS` if the device is unusable.
        dtype: dtype of the activations.
        reason: why the engine uses these kernels, why it cannot use faster kernels, or why the device is unusable.
        free_mb: free memory of the device, in MiB; None if unknown.
    """

    device: str
    kernels: str
    dtype: str
    reason: str
    free_mb: int | None = None


class KernelSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that torch finds on this machine, and the kernels that an engine would use on each of them.

    Attributes:
        threads: number of threads that an engine uses on a CPU.
        devices: the kernels for each device.
        unusable: why an engine cannot use the device on which the models run; None if it can.
        without_access: pairs of torch names of CUDA devices that cannot access each other's memory directly.
    """

    threads: int
    devices: list[DeviceKernels]
    unusable: str | None = None
    without_access: list[tuple[str, str]] = []


def look_at_kernels(settings: TorchConfig, device: str, why: str = "") -> Iterator[CheckResult]:
    """Check torch, the kernels for each device that torch finds, and whether `device` is usable.

    Args:
        settings: options of the engine.
        device: torch name of the device on which the models run.
        why: reason for the choice of `device`, for the printed text; may be empty.
    """
    if not torch_version():
        yield CheckResult("torch", "fault", "torch is missing: pip install 'helexa[neuron]'")
        return
    yield CheckResult("torch", "fine", f"torch {torch_version()}")
    try:
        survey = _survey(settings, device)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        yield CheckResult("kernels", "fault", f"no engine can run: {error}")
        return
    yield from look_at_compiled_modules("torch")
    for entry in survey.devices:
        threads = f" on {survey.threads} threads" if entry.device == "cpu" else ""
        free = "" if entry.free_mb is None else f", {entry.free_mb} MiB free"
        text = f"{entry.device}: {entry.kernels} kernels in {entry.dtype}{threads}{free}: {entry.reason}"
        yield CheckResult("kernels", "fine", text)
    cuda = [entry.device for entry in survey.devices if entry.device.startswith("cuda") and entry.kernels != NO_KERNELS]
    if survey.without_access:
        pairs = ", ".join(f"{first} and {second}" for first, second in survey.without_access)
        yield CheckResult("device", "note", f"no direct memory access, data is copied through main memory: {pairs}")
    elif len(cuda) > 1:
        yield CheckResult("device", "fine", f"direct memory access between {', '.join(cuda)}")
    if settings.dtype not in ("auto", "bfloat16"):
        text = f"to make it faster: dtype is '{settings.dtype}', which the native kernels do not support; use 'auto'"
        yield CheckResult("kernels", "note", text)
    if survey.unusable:
        yield CheckResult("device", "fault", survey.unusable)
    else:
        dtypes = [f" in {entry.dtype}" for entry in survey.devices if entry.device == device]
        yield CheckResult("device", "fine", f"models run on {device}{''.join(dtypes)}{f' ({why})' if why else ''}")


def _survey(settings: TorchConfig, device: str) -> KernelSurvey:
    """Start a process that imports torch, and return the devices and kernels that this process reports.

    Raises:
        ValueError: the process failed. The message is the last line of its stderr.
        subprocess.TimeoutExpired: the process took longer than `_SURVEY_SECONDS`.
    """
    options = msgspec.json.encode(settings.engine_options(device)).decode()
    command = [sys.executable, "-P", "-m", "helexa.neuron.kernel_survey", options]
    run = subprocess.run(
        command,
        env=ENVIRONMENT | os.environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=_SURVEY_SECONDS,
    )
    if run.returncode:
        raise ValueError((run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1])
    return msgspec.json.decode(run.stdout, type=KernelSurvey)
