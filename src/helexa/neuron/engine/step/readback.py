"""Copies tensors from the device to the host without blocking."""

import torch
from torch import Tensor


class Readback:
    """A copy of a tensor to the host, started at construction.

    Args:
        tensor: the tensor to copy. On a GPU, later kernels may overwrite it. On other devices, `wait` reads the tensor,
            so it must stay unchanged until then.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = tensor.to("cpu", non_blocking=True)  # into pinned memory
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """Return the copy on the CPU. Wait for work launched before the copy only."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.cpu()
