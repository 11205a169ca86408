"""Check torch and the kernels that engines would choose on each device.

A separate process imports torch, if it is installed, because a broken installation may crash this process.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import msgspec

from helexa.core.display import memory_text
from helexa.core.errors import not_installed
from helexa.neuron.config import TorchConfig
from helexa.neuron.doctor_machine import CheckResult, look_at_torch_build
from helexa.neuron.engine.ipc.environment import ENVIRONMENT
from helexa.neuron.hardware.discovery import torch_version
from helexa.neuron.options import TorchOptions

NO_KERNELS = "no"
"""Kernel name of an unusable device."""

_SURVEY_SECONDS = 300  # a slow disk delays the import of torch, and kernels may have to be compiled


class DeviceKernels(msgspec.Struct, frozen=True, kw_only=True):
    """The compute kernels that an engine would use on one device."""

    device: str
    kernels: str  # name of the set of kernels; `NO_KERNELS` if the device is unusable
    dtype: str
    reason: str  # why the engine uses these kernels, why it cannot use faster kernels, or why the device is unusable
    free_mb: int | None = None  # free memory of the device, in MiB; None if unknown


class KernelSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """The kernels that an engine would use on each device of this machine."""

    threads: int  # number of threads that an engine uses on a CPU
    devices: list[DeviceKernels]
    unusable: str | None = None  # why an engine cannot use the device on which the models run; None if it can
    # pairs of torch names of CUDA devices that cannot access each other's memory directly
    without_access: list[tuple[str, str]] = []


def look_at_kernels(settings: TorchOptions | TorchConfig, device: str, why: str = "") -> Iterator[CheckResult]:
    """Check torch, the kernels of each device, and whether `device` is usable.

    Args:
        why: reason for the choice of `device`, for the printed text; may be empty.
    """
    if torch_version():
        yield CheckResult("torch", "fine", f"torch {torch_version()}")
        yield from look_at_torch_build()
    elif device == "cpu":
        yield CheckResult("torch", "fine", "torch is not installed: the native kernels do not need it")
    else:
        yield CheckResult("torch", "fault", not_installed("torch", "gpu"))
        return
    try:
        survey = _survey(settings, device)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        yield CheckResult("kernels", "fault", f"no engine can run: {error}")
        return
    yield from look_at_compiled_modules("numpy" if device == "cpu" else "torch")
    for entry in survey.devices:
        threads = f" on {survey.threads} threads" if entry.device == "cpu" else ""
        free = "" if entry.free_mb is None else f", {memory_text(entry.free_mb)} free"
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


def _survey(settings: TorchOptions | TorchConfig, device: str) -> KernelSurvey:
    """Start a process that imports torch, and return what it reports.

    Raises:
        ValueError: the process failed. The message is the last line of its stderr.
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


def look_at_compiled_modules(package: str) -> Iterator[CheckResult]:
    """Report if an installed and already imported package has no compiled modules."""
    spec = find_spec(package)
    if spec is None or spec.origin is None or Path(cache_from_source(spec.origin)).exists():
        return
    folder = Path(spec.origin).parent
    if sys.dont_write_bytecode:
        remedy = "unset PYTHONDONTWRITEBYTECODE"
    else:
        command = shlex.join([sys.executable, "-m", "compileall", "-q", str(folder)])
        remedy = f"as a user who may write to its folder, run {command}"
    yield CheckResult(package, "note", f"to make starts faster: each start compiles {package} again; {remedy}")
