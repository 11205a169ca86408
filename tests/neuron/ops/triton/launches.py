"""What the engine launches for models that matter, each to be compiled for every card (see `compiling.py`)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from helexa.neuron.ops.gpu import GpuOps


@dataclass(frozen=True)
class Launch:
    """Calls kernels with tensors on `meta`.

    Attributes:
        kv_bits: of the KV cache.
    """

    call: Callable[[GpuOps], object]
    kv_bits: int = 16

    def __call__(self, ops: GpuOps) -> None:
        self.call(ops)


def _numbers(ops: GpuOps, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or ops.dtype, device=ops.device)


def _rms_norm(ops: GpuOps, hidden: int) -> None:
    norm = ops.rms_norm(_numbers(ops, hidden, dtype=torch.float32), 1e-6)
    norm(_numbers(ops, 4, hidden, dtype=torch.float32), _numbers(ops, 4, hidden))


LAUNCHES = {
    "rms_norm 8B": Launch(lambda ops: _rms_norm(ops, 4096)),
}
