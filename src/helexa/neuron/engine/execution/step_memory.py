"""The memory that steps allocate on a GPU."""

from dataclasses import dataclass
from typing import Any

from helexa.neuron import tensors

_ALLOWANCE = 1.1  # factor of a step's memory, because some free blocks of the allocator fit no tensor


@dataclass(frozen=True)
class DeviceMemory:
    """The measured memory of steps on one GPU, in bytes."""

    weights: int  # bytes allocated for the weights
    step: int  # bytes allocated by the largest step, in addition to the weights and caches
    # bytes that would be free if torch returned all memory of this process, also that of the weights and caches
    free: int


class StepMemory:
    """Measures the memory of the steps between its construction and `read`.

    Args:
        weights: bytes of the weights, which `read` returns unchanged.
        cuda: module that provides memory statistics; None for `torch.cuda`.
    """

    def __init__(self, weights: int, cuda: Any = None) -> None:
        self._weights = weights
        self._cuda = cuda = tensors.cuda if cuda is None else cuda
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()
        self._before = cuda.memory_allocated()

    def read(self) -> DeviceMemory:
        """Wait until the steps have ended, and return the measured sizes."""
        cuda = self._cuda
        cuda.synchronize()
        step = int((cuda.max_memory_allocated() - self._before) * _ALLOWANCE)
        cuda.empty_cache()
        return DeviceMemory(self._weights, step, cuda.mem_get_info()[0] + cuda.memory_reserved())
