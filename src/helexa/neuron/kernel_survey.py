"""The kernels that engines would choose on each device, for `neuron doctor`.

If torch is installed, a separate process (`kernel_survey_process.py`) imports it, because a broken installation of
torch may crash the process.
"""

import os
import subprocess
import sys

import msgspec

from helexa.neuron.config import TorchConfig
from helexa.neuron.engine.ipc import ENVIRONMENT
from helexa.neuron.options import TorchOptions

NO_KERNELS = "no"
"""Value of `DeviceKernels.kernels` for a device that cannot be used."""

_SURVEY_SECONDS = 300  # enough to import torch from a slow disk, and to compile the kernels


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


def survey_kernels(settings: TorchOptions | TorchConfig, device: str) -> KernelSurvey:
    """Return the kernels that engines would choose on each device, from a new process.

    Raises:
        ValueError: the process failed. The message is the last line of its stderr.
        subprocess.TimeoutExpired: the process ran longer than `_SURVEY_SECONDS`.
    """
    options = msgspec.json.encode(settings.engine_options(device)).decode()
    command = [sys.executable, "-P", "-m", "helexa.neuron.kernel_survey_process", options]
    run = subprocess.run(
        command,
        env=ENVIRONMENT | os.environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=_SURVEY_SECONDS,
    )
    if run.returncode:
        raise ValueError(
            (run.stderr.strip().splitlines() or [f"the check of the kernels ended with exit code {run.returncode}"])[-1]
        )
    return msgspec.json.decode(run.stdout, type=KernelSurvey)
