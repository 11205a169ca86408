"""Selection of the kernel implementation for a device, an activation dtype and a model."""

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch

from helexa.neuron.hardware.triton_toolchain import triton_cache, triton_missing
from helexa.neuron.ops.constants import MIXED, Kernels
from helexa.neuron.ops.protocol import Ops
from helexa.neuron.ops.reference.reference import ReferenceOps


@dataclass(frozen=True)
class KernelChoice:
    """The selected kernels, and an explanation for the user.

    Attributes:
        ops: the selected kernels.
        reason: why these kernels were selected, or why faster kernels cannot be used.
    """

    ops: Ops
    reason: str


OLDEST = (7, 5)
"""Lowest CUDA compute capability that the Triton kernels support."""


def choose(
    device: torch.device,
    dtype: torch.dtype | None,
    config: dict[str, Any],
    *,
    kv_bits: int = 16,
    x_bits: int = MIXED,
    half: bool = True,
    kernels: Kernels = "auto",
) -> KernelChoice:
    """Return the fastest kernels that support this device, activation dtype and model, and why they were selected.

    Args:
        dtype: dtype of activations; None for the default dtype of the device.
        config: the model's configuration with the keys of Hugging Face's `config.json`.
        kv_bits: bits of each number in the KV cache, 16 or 8. The plain-torch kernels ignore the value 8.
        x_bits: bits to which matrix products of the native kernels round activations, 16, 8, or `MIXED` for
            8 bits, with 16 bits for outliers.
        half: whether the model's activations stay within the range of float16.
        kernels: implementation to use, `torch` or `triton`. `auto` selects the fastest implementation that works.
            If `triton` cannot be used, the plain-torch kernels are returned.
    """
    if kernels == "triton" or (kernels == "auto" and device.type == "cuda"):
        reason = _why_triton_is_unusable(device)
        if reason is None:
            os.environ.setdefault("TRITON_CACHE_DIR", str(triton_cache()))
            from helexa.neuron.ops.gpu.gpu import GpuOps

            return KernelChoice(GpuOps(device, dtype or _gpu_dtype(device, half), kv_bits), f"Triton on {device.type}")
        return KernelChoice(ReferenceOps(device, dtype or _gpu_dtype(device, half)), reason)
    if kernels == "torch":
        return KernelChoice(ReferenceOps(device, dtype or _gpu_dtype(device, half)), "plain torch was requested")
    if device.type != "cpu":
        return KernelChoice(ReferenceOps(device, dtype or _gpu_dtype(device, half)), f"plain torch on {device.type}")
    if dtype not in (None, torch.bfloat16):
        return KernelChoice(ReferenceOps(device, dtype), f"{dtype} was requested".replace("torch.", ""))
    from helexa.neuron.ops.native.machine_code.native_kernels import Unavailable, native_kernels
    from helexa.neuron.ops.native.native import NativeOps
    from helexa.neuron.ops.torch_cpu import CpuOps

    try:
        library, reason = native_kernels(), NativeOps.unsupported_shape(config)
        if reason is None:
            return KernelChoice(NativeOps(library, torch.get_num_threads(), kv_bits, x_bits), library.origin)
    except Unavailable as error:
        reason = str(error)
    if CpuOps.available():
        return KernelChoice(CpuOps(device, torch.bfloat16), reason)
    return KernelChoice(ReferenceOps(device, dtype or torch.float32), reason)


def _why_triton_is_unusable(device: torch.device) -> str | None:
    if device.type == "cuda" and (missing := triton_missing()) is not None:
        return missing
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton runs on a CPU in its interpreter alone (TRITON_INTERPRET=1)"
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < OLDEST:
        return (
            f"Triton needs compute capability {OLDEST[0]}.{OLDEST[1]}, this device has {capability[0]}.{capability[1]}"
        )
    return None


def _gpu_dtype(device: torch.device, half: bool) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return accelerator_dtype(device.type, capability, half=half)


def accelerator_dtype(kind: str, capability: tuple[int, int] | None, *, half: bool) -> torch.dtype:
    """Return the default dtype of activations on an accelerator.

    The result is bfloat16 on CUDA devices from compute capability 8.0 on. Otherwise it is float16 if `half` is True,
    else float32.

    Args:
        kind: torch device type, `cuda` or `mps`.
        capability: CUDA compute capability, major and minor; None for other devices.
        half: whether the model's activations stay within the range of float16.
    """
    if kind == "cuda" and capability is not None and capability >= (8, 0):
        return torch.bfloat16
    return torch.float16 if half else torch.float32
