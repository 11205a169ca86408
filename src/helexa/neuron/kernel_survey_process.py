"""Process that reports which kernels engines would use on each device, and why.

`neuron doctor` starts this module as a separate process, because it imports torch, if torch is installed:

    python -m helexa.neuron.kernel_survey_process OPTIONS

`OPTIONS` are `EngineOptions` in JSON. The process prints a `KernelSurvey` in JSON.
"""

import sys
from itertools import combinations

import msgspec
import psutil

from helexa.core.errors import not_installed
from helexa.neuron import tensors
from helexa.neuron.engine.execution.device_errors import DeviceError
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.backend_kernels_and_kv_dtype import usable_device
from helexa.neuron.engine.ranks.cpu_binding import threads_of_rank
from helexa.neuron.kernel_survey import NO_KERNELS, DeviceKernels, KernelSurvey
from helexa.neuron.ops.kernel_selection import select_kernels
from helexa.neuron.tensors import Device, DType


def take(options: EngineOptions) -> KernelSurvey:
    """Return the kernels that an engine with `options` would choose on each device."""
    if not tensors.torch_is_installed():
        tensors.use("numpy")
    tensors.set_num_threads(threads_of_rank(options, 0))
    dtype = None if options.dtype == "auto" else getattr(tensors, options.dtype)
    names = ["cpu"]
    if tensors.uses_torch():
        names += [f"cuda:{index}" for index in range(tensors.cuda.device_count())]
        names += ["mps"] * tensors.backends.mps.is_available()
    unusable = None
    try:
        usable_device(options.device)
    except DeviceError as error:
        unusable = str(error)
    devices = [_kernels(tensors.device(name), dtype) for name in names]
    if not tensors.uses_torch() and devices[0].kernels == NO_KERNELS and unusable is None:
        unusable = f"cpu: {devices[0].reason}; {not_installed('torch', 'gpu')}"
    return KernelSurvey(
        threads=tensors.get_num_threads(),
        devices=devices,
        unusable=unusable,
        without_access=[
            (first, second)
            for first, second in combinations([name for name in names if name.startswith("cuda")], 2)
            if _lack_access(first, second)
        ],
    )


def _kernels(device: Device, dtype: DType | None) -> DeviceKernels:
    try:
        choice = select_kernels(device, dtype, {})
        free_mb = _free_mb(device)
    except (AssertionError, RuntimeError, tensors.TorchRequired) as error:  # for example, the driver is too old
        reason = f"the device cannot be used: {str(error).partition(chr(10))[0]}"
        return DeviceKernels(device=str(device), kernels=NO_KERNELS, dtype="any dtype", reason=reason)
    return DeviceKernels(
        device=str(device),
        kernels=choice.ops.name,
        dtype=tensors.dtype_name(choice.ops.dtype),
        reason=choice.reason,
        free_mb=free_mb,
    )


def _lack_access(first: str, second: str) -> bool:
    try:
        return not tensors.cuda.can_device_access_peer(tensors.device(first), tensors.device(second))
    except (AssertionError, RuntimeError):
        return False  # one of the devices is unusable; the survey reports this in the entry of the device


def _free_mb(device: Device) -> int | None:
    if device.type == "cpu":
        return psutil.virtual_memory().available >> 20
    return tensors.cuda.mem_get_info(device)[0] >> 20 if device.type == "cuda" else None


if __name__ == "__main__":
    survey = take(msgspec.json.decode(sys.argv[1], type=EngineOptions))
    sys.stdout.write(msgspec.json.encode(survey).decode())
