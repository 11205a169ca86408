"""Copies of arrays from host memory to device memory that do not block the host."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return a copy of a host array on the device, without waiting for the work that is queued on the device.

    The copy uses pinned memory, because a copy from pageable memory would wait for all work queued on the GPU.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
