"""The one choice point for kernels; `reference` is the plain-torch oracle."""

from dataclasses import dataclass
from typing import Any

import torch

from helexa.neuron.device_choice import accelerator_dtype
from helexa.neuron.ops.reference import ReferenceOps


@dataclass(frozen=True)
class Choice:
    """The kernels that were chosen, and why not faster ones, if there are any."""

    ops: ReferenceOps
    reason: str


NARROW = 2048
"""Models of this hidden size and below say something else when products round their input to 8 bits."""


def choose(
    device: torch.device,
    dtype: torch.dtype | None,
    config: dict[str, Any],
    *,
    kv_bits: int = 16,
    x_bits: int | None = None,
    half: bool = True,
) -> Choice:
    """The fastest kernels that work for this device, activation dtype and model.

    Args:
        dtype: of the activations; None for what suits the device.
        config: the model's, in Hugging Face's terms.
        kv_bits: of K and V in the cache, 16 or 8; only the native kernels know 8.
        x_bits: to which the native kernels' products round their input, 16 or 8; None for what suits the model.
        half: the model's activations stay within float16.
    """
    if device.type != "cpu":
        return Choice(ReferenceOps(device, dtype or _gpu_dtype(device, half)), f"plain torch on {device.type}")
    if dtype not in (None, torch.bfloat16):
        return Choice(ReferenceOps(device, dtype), f"{dtype} was asked for".replace("torch.", ""))
    from helexa.neuron.ops.compiler import Unavailable, native_kernels
    from helexa.neuron.ops.cpu import CpuOps
    from helexa.neuron.ops.native import NativeOps

    try:
        library, reason = native_kernels(), NativeOps.refusal(config)
        if reason is None:
            x_bits = x_bits or (16 if (config.get("hidden_size") or 0) <= NARROW else 8)
            return Choice(NativeOps(library, torch.get_num_threads(), kv_bits, x_bits), "compiled for this machine")
    except Unavailable as error:
        reason = str(error)
    if CpuOps.available():
        return Choice(CpuOps(device, torch.bfloat16), reason)
    return Choice(ReferenceOps(device, dtype or torch.float32), reason)


def _gpu_dtype(device: torch.device, half: bool) -> torch.dtype:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return getattr(torch, accelerator_dtype(device.type, capability, half=half))
