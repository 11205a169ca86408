"""The one choice point for kernels; `reference` is the plain-torch oracle."""

import torch

from helexa.neuron.ops.reference import ReferenceOps


def choose(device: torch.device, dtype: torch.dtype) -> ReferenceOps:
    """The fastest kernels that work for this device and activation dtype."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        from helexa.neuron.ops.compiler import native_kernels
        from helexa.neuron.ops.cpu import CpuOps
        from helexa.neuron.ops.native import NativeOps

        if CpuOps.available():
            library = native_kernels()
            return CpuOps(device, dtype) if library is None else NativeOps(device, dtype, library)
    return ReferenceOps(device, dtype)


def default_dtype(device: torch.device) -> torch.dtype:
    """The activation dtype that suits a device: bfloat16 where the hardware multiplies it."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    if device.type == "mps":
        return torch.float16
    from helexa.neuron.ops.cpu import CpuOps

    return torch.bfloat16 if CpuOps.available() else torch.float32
