"""Normalized patches of an image, in memory that the sandbox process, the server and the engine share."""

import mmap
import os
import weakref
from math import prod

import numpy as np
from numpy.typing import NDArray

from helexa.neuron.processes import shared_memory

_ITEM_BYTES = np.dtype(np.float32).itemsize


class SharedPixels:
    """A float32 array in shared memory.

    Attributes:
        descriptor: file descriptor of the shared memory. `close`, or the end of this object, closes it.
        shape: shape of the array.
    """

    def __init__(self, descriptor: int, shape: tuple[int, int]) -> None:
        self.descriptor = descriptor
        self.shape = shape
        self.close = weakref.finalize(self, os.close, descriptor)
        """Close the file descriptor. The memory is freed when no process maps it or has a descriptor of it."""

    @staticmethod
    def create(max_bytes: int) -> int:
        """Return the file descriptor of new shared memory for an array of at most `max_bytes` bytes."""
        return shared_memory.create("helexa-pixels", max_bytes)

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return prod(self.shape) * _ITEM_BYTES

    def array(self) -> NDArray[np.float32]:
        """Return the array (see `pixel_array`)."""
        return pixel_array(self.descriptor, self.shape)


def pixel_array(descriptor: int, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Return the array in the shared memory with the file descriptor `descriptor`.

    The array stays valid when the descriptor is closed. Other processes see changes of its values.
    """
    return np.frombuffer(mmap.mmap(descriptor, prod(shape) * _ITEM_BYTES), np.float32).reshape(shape)
