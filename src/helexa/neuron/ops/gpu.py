"""The kernels of GPUs: Triton where it pays, torch's own for the rest; their twins are in `reference`."""

import torch

from helexa.neuron.ops.reference import ReferenceOps


class GpuOps(ReferenceOps):
    """Kernels for a CUDA device, or for a CPU in Triton's interpreter.

    Args:
        kv_bits: of each number in the KV cache, 16 or 8.
    """

    name = "triton"

    def __init__(self, device: torch.device, dtype: torch.dtype, kv_bits: int = 16) -> None:
        super().__init__(device, dtype)
