"""What computes: torch, and the kernels that engines would choose.

Torch is asked in a process of its own, as engines have it: a torch that breaks breaks that one.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec

from helexa.neuron.config import TorchConfig
from helexa.neuron.doctor.finding import Finding
from helexa.neuron.engine.ipc.environment import ENVIRONMENT
from helexa.neuron.hardware.discovery import torch_version

NO_KERNELS = "no"
"""What stands for the kernels of a device that cannot be used."""

_SURVEY_SECONDS = 300  # torch may have to be read from a slow disk, and the kernels compiled


class DeviceKernels(msgspec.Struct, frozen=True, kw_only=True):
    """What serves models on one device.

    Attributes:
        dtype: of the activations.
        reason: for these kernels, or against faster ones.
        free_mb: memory that a model may take, in MiB; None where nobody knows.
    """

    device: str
    kernels: str
    dtype: str
    reason: str
    free_mb: int | None = None


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """Every device that torch can use.

    Attributes:
        threads: that an engine computes with on a CPU.
        unusable: why the configured device cannot be used, if it cannot.
        apart: pairs of CUDA devices of which one cannot reach the other's memory.
    """

    threads: int
    devices: list[DeviceKernels]
    unusable: str | None = None
    apart: list[tuple[str, str]] = []


def look_at_kernels(settings: TorchConfig, device: str, why: str = "") -> Iterator[Finding]:
    """What torch says of every device, and whether `device` can be used.

    Args:
        why: it was chosen.
    """
    if not torch_version():
        yield Finding("torch", "fault", "torch is missing: pip install 'helexa[neuron]'")
        return
    yield Finding("torch", "fine", f"torch {torch_version()}")
    try:
        survey = _survey(settings, device)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        yield Finding("kernels", "fault", f"no engine can run: {error}")
        return
    for one in survey.devices:
        threads = f" on {survey.threads} threads" if one.device == "cpu" else ""
        free = "" if one.free_mb is None else f", {one.free_mb} MiB free"
        text = f"{one.device}: {one.kernels} kernels in {one.dtype}{threads}{free}: {one.reason}"
        yield Finding("kernels", "fine", text)
    cuda = [one.device for one in survey.devices if one.device.startswith("cuda") and one.kernels != NO_KERNELS]
    if survey.apart:
        pairs = ", ".join(f"{one} and {other}" for one, other in survey.apart)
        yield Finding("device", "note", f"by way of main memory alone exchange data: {pairs}")
    elif len(cuda) > 1:
        yield Finding("device", "fine", f"{', '.join(cuda)} reach one another's memory")
    if settings.dtype not in ("auto", "bfloat16"):
        text = f"to make it faster: dtype is '{settings.dtype}', which the native kernels do not know; use 'auto'"
        yield Finding("kernels", "note", text)
    if survey.unusable:
        yield Finding("device", "fault", survey.unusable)
    else:
        dtypes = [f" in {one.dtype}" for one in survey.devices if one.device == device]
        yield Finding("device", "fine", f"models run on {device}{''.join(dtypes)}{f' ({why})' if why else ''}")


def _survey(settings: TorchConfig, device: str) -> Survey:
    """What torch says.

    Raises:
        ValueError: it said why it cannot.
    """
    options = msgspec.json.encode(settings.engine_options(device)).decode()
    command = [sys.executable, "-m", "helexa.neuron.kernel_survey", options]
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
    return msgspec.json.decode(run.stdout, type=Survey)
