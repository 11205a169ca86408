"""The kernels of GPUs: Triton where it pays, torch's own for the rest; their twins are in `reference`."""

import torch
from torch import Tensor

from helexa.neuron.ops.norm import NormOp
from helexa.neuron.ops.reference import ReferenceOps
from helexa.neuron.ops.triton.card import Card
from helexa.neuron.ops.triton.norm import RmsNorm


class GpuOps(ReferenceOps):
    """Kernels for a CUDA device, or for a CPU in Triton's interpreter.

    Args:
        kv_bits: of each number in the KV cache, 16 or 8.
        card: to build kernels for; None for the device's own.
    """

    name = "triton"

    def __init__(self, device: torch.device, dtype: torch.dtype, kv_bits: int = 16, card: Card | None = None) -> None:
        super().__init__(device, dtype)
        self.card = card or Card.of(device)

    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        """One program for a row."""
        return RmsNorm(weight, eps, self.dtype)
