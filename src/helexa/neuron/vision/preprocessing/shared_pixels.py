"""Normalized patches of an image, in memory that the sandbox process, the server and the engine share."""

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from helexa.neuron.processes import shared_memory


class SharedPixels:
    """A float32 array in shared memory.

    Attributes:
        descriptor: file descriptor of the shared memory. `close` closes it.
        shape: shape of the array.
    """

    def __init__(self, descriptor: int, shape: tuple[int, int]) -> None:
        self.descriptor = descriptor
        self.shape = shape

    @staticmethod
    def create(max_bytes: int) -> int:
        """Return the file descriptor of new shared memory for an array of at most `max_bytes` bytes."""
        return shared_memory.create("helexa-pixels", max_bytes)

    def array(self) -> NDArray[np.float32]:
        """Return the array. It stays valid after `close`, and other processes see changes of its values."""
        rows, columns = self.shape
        memory = mmap.mmap(self.descriptor, rows * columns * np.dtype(np.float32).itemsize)
        return np.frombuffer(memory, np.float32).reshape(self.shape)

    def close(self) -> None:
        """Close the file descriptor. The memory is freed when no process maps it or has a descriptor of it."""
        os.close(self.descriptor)
