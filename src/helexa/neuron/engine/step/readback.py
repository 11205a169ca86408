"""What the host wants to read of the device, on its way while both go on."""

import torch
from torch import Tensor


class Readback:
    """A copy of a tensor for the host, begun at once.

    Args:
        tensor: what is launched after this may change it, on a GPU; on a CPU it is what `wait` returns.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = tensor.to("cpu", non_blocking=True)  # into pinned memory
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """The copy on the CPU; waits for what was launched before it, and for nothing after."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.cpu()
