"""Measures the GPU memory that the weights and the steps of this process take."""

from typing import Any

import torch

from helexa.neuron.engine.execution.device_memory import DeviceMemory

_ALLOWANCE = 1.1  # factor for a step's memory, because no tensor fits into some of the allocator's free blocks


class StepMemory:
    """A measurement of the steps that run between the construction of this object and `read`.

    Args:
        weights: bytes that are allocated for the weights.
        cuda: module that provides memory statistics; normally `torch.cuda`.
    """

    def __init__(self, weights: int, cuda: Any = torch.cuda) -> None:
        self._weights = weights
        self._cuda = cuda
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
