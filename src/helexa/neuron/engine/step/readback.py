"""Copies tensors from the device to the host without blocking."""

import torch
from torch import Tensor


class Readback:
    """A copy of a tensor from the device to the host. The copy starts when the object is created.

    Args:
        tensor: the tensor to copy. On a GPU, kernels that are launched later may overwrite the tensor. On other
            devices, the tensor must stay unchanged until `wait` returns.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = tensor.to("cpu", non_blocking=True)  # into pinned memory
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """Wait for the copy, and return it as a CPU tensor.

        Kernels that were launched after the copy are not waited for.
        """
        if self._event is not None:
            self._event.synchronize()
        return self._copy.cpu()
