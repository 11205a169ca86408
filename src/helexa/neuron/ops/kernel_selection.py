"""Selection of the kernels for a device, an activation dtype and a model."""

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

from helexa.neuron import tensors
from helexa.neuron.hardware.triton_toolchain import triton_cache, triton_missing
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.kernel_header import MIXED, Kernels
from helexa.neuron.tensors import Device, DType


@dataclass(frozen=True)
class SelectedKernels:
    """The selected kernels, and the reason as text for the user."""

    ops: Ops  # the selected kernels
    reason: str  # why these kernels were selected, or why faster kernels cannot be used


OLDEST = (7, 5)  # Lowest CUDA compute capability that the Triton kernels support


def select_kernels(
    device: Device,
    dtype: DType | None,
    config: dict[str, Any],
    *,
    kv_bits: int | None = None,
    x_bits: int = MIXED,
    half: bool = True,
    kernels: Kernels = "auto",
) -> SelectedKernels:
    """Return the fastest kernels for a device, dtype and model, and the reason.

    Args:
        dtype: dtype of activations; None for the default dtype of the device.
        config: the model's configuration with the keys of Hugging Face's `config.json`.
        kv_bits: bits of each number in the KV cache, 16 or 8; None for 8 with the native kernels, 16 with others. With
            Triton, 16 means numbers of the activation dtype. Plain torch uses the activation dtype for all values.
        x_bits: bits to which matrix products of the native kernels round activations, 16, 8, or `MIXED` for 8 bits,
            with 16 bits for outliers.
        half: whether the model's activations stay within the range of float16.
        kernels: implementation to use. If `triton` cannot be used, the result is plain torch.

    Raises:
        TorchRequired: the selected kernels are not the native kernels, and this process does not use torch.
    """
    if kernels == "triton" or (kernels == "auto" and device.type == "cuda"):
        reason = _why_triton_is_unusable(device)
        if reason is None:
            os.environ.setdefault("TRITON_CACHE_DIR", str(triton_cache()))
            from helexa.neuron.ops.triton.gpu_ops import GpuOps

            return SelectedKernels(
                GpuOps(device, dtype or _gpu_dtype(device, half), kv_bits or 16), f"Triton on {device.type}"
            )
        return _plain_torch(device, dtype or _gpu_dtype(device, half), reason)
    if kernels == "torch":
        return _plain_torch(device, dtype or _gpu_dtype(device, half), "plain torch was requested")
    if device.type != "cpu":
        return _plain_torch(device, dtype or _gpu_dtype(device, half), f"plain torch on {device.type}")
    # The native kernels and those of `CpuOps` exist only for bfloat16.
    if dtype is not None and dtype != tensors.bfloat16:
        return _plain_torch(device, dtype, f"{tensors.dtype_name(dtype)} was requested")
    from helexa.neuron.ops.native.kernel_library import Unavailable, native_kernels
    from helexa.neuron.ops.native.native_ops import NativeOps

    try:
        library, reason = native_kernels(), NativeOps.unsupported_shape(config)
        if reason is None and not tensors.uses_torch():
            reason = NativeOps.requires_torch(config)
        if reason is None:
            return SelectedKernels(NativeOps(library, tensors.get_num_threads(), kv_bits or 8, x_bits), library.origin)
    except Unavailable as error:
        reason = str(error)
    tensors.require_torch(reason)
    from helexa.neuron.ops.torch_cpu_ops import CpuOps

    if CpuOps.available():
        return SelectedKernels(CpuOps(device, tensors.bfloat16), reason)
    return _plain_torch(device, dtype or tensors.float32, reason)


def _plain_torch(device: Device, dtype: DType, reason: str) -> SelectedKernels:
    tensors.require_torch(reason)
    from helexa.neuron.ops.reference.reference_ops import ReferenceOps

    return SelectedKernels(ReferenceOps(device, dtype), reason)


def _why_triton_is_unusable(device: Device) -> str | None:
    if device.type == "cuda" and (missing := triton_missing()) is not None:
        return missing
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton runs on a CPU only in its interpreter; set TRITON_INTERPRET=1"
    if device.type == "cuda" and (capability := tensors.cuda.get_device_capability(device)) < OLDEST:
        return (
            f"Triton needs compute capability {OLDEST[0]}.{OLDEST[1]}, this device has {capability[0]}.{capability[1]}"
        )
    return None


def _gpu_dtype(device: Device, half: bool) -> DType:
    if device.type == "cpu":
        return tensors.float32
    capability = tensors.cuda.get_device_capability(device) if device.type == "cuda" else None
    return accelerator_dtype(device.type, capability, half=half)


def accelerator_dtype(kind: str, capability: tuple[int, int] | None, *, half: bool) -> DType:
    """Return the default dtype of activations on an accelerator.

    Args:
        kind: torch device type, `cuda` or `mps`.
        capability: CUDA compute capability, major and minor; None for other devices.
        half: whether the model's activations stay within the range of float16.
    """
    # Before compute capability 8.0, tensor cores compute float16, but not bfloat16.
    if kind == "cuda" and capability is not None and capability >= (8, 0):
        return tensors.bfloat16
    return tensors.float16 if half else tensors.float32
