"""Report which compute kernels engines would use on each device of this machine, and why.

`neuron doctor` starts this module as a separate process, because it imports torch:

    python -m helexa.neuron.kernel_survey OPTIONS

`OPTIONS` are `EngineOptions` in JSON. The process prints a `KernelSurvey` in JSON.
"""

import sys
from itertools import combinations

import msgspec
import psutil
import torch

from helexa.neuron.doctor.kernels import NO_KERNELS, DeviceKernels, KernelSurvey
from helexa.neuron.engine.execution.device_errors import DeviceError
from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine.loading.device import usable_device
from helexa.neuron.hardware.cores import physical_cores
from helexa.neuron.ops.choice import choose


def take(options: EngineOptions) -> KernelSurvey:
    """Return the kernels that an engine with `options` would choose on each device for a typical model.

    Native kernels are compiled if necessary.
    """
    torch.set_num_threads(options.threads or physical_cores())
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        names.append("mps")
    unusable = None
    try:
        usable_device(options.device)
    except DeviceError as error:
        unusable = str(error)
    return KernelSurvey(
        threads=torch.get_num_threads(),
        devices=[_kernels(torch.device(name), dtype) for name in names],
        unusable=unusable,
        without_access=[
            (first, second)
            for first, second in combinations([name for name in names if name.startswith("cuda")], 2)
            if _lack_access(first, second)
        ],
    )


def _kernels(device: torch.device, dtype: torch.dtype | None) -> DeviceKernels:
    try:
        choice = choose(device, dtype, {})
        free_mb = _free_mb(device)
    except (AssertionError, RuntimeError) as error:  # the device's memory is full, or its driver is too old
        reason = f"it cannot be used: {str(error).partition(chr(10))[0]}"
        return DeviceKernels(device=str(device), kernels=NO_KERNELS, dtype="any dtype", reason=reason)
    return DeviceKernels(
        device=str(device),
        kernels=choice.ops.name,
        dtype=str(choice.ops.dtype).removeprefix("torch."),
        reason=choice.reason,
        free_mb=free_mb,
    )


def _lack_access(first: str, second: str) -> bool:
    try:
        return not torch.cuda.can_device_access_peer(torch.device(first), torch.device(second))
    except (AssertionError, RuntimeError):
        return False  # one of the devices is unusable, which its own entry reports


def _free_mb(device: torch.device) -> int | None:
    if device.type == "cpu":
        return psutil.virtual_memory().available >> 20
    return torch.cuda.mem_get_info(device)[0] >> 20 if device.type == "cuda" else None


if __name__ == "__main__":
    survey = take(msgspec.json.decode(sys.argv[1], type=EngineOptions))
    sys.stdout.write(msgspec.json.encode(survey).decode())
