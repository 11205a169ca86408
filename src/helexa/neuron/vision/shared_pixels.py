"""Normalized patches of an image, in memory that processes share."""

import mmap
import os
import weakref
from math import prod

import numpy as np
from numpy.typing import NDArray

from helexa.neuron.processes import heaps_and_shared_memory

_ITEM_BYTES = np.dtype(np.float32).itemsize


class SharedPixels:
    """A float32 array in shared memory."""

    def __init__(self, descriptor: int, shape: tuple[int, int]) -> None:
        # File descriptor of the shared memory. `close`, or the end of this object, closes it.
        self.descriptor = descriptor
        self.shape = shape  # shape of the array
        # Function that closes the file descriptor. The memory is freed when no process maps it or has a descriptor of
        # it.
        self.close = weakref.finalize(self, os.close, descriptor)

    @staticmethod
    def create(max_bytes: int) -> int:
        """Return the file descriptor of new shared memory of at most `max_bytes` bytes."""
        return heaps_and_shared_memory.create_shared("helexa-pixels", max_bytes)

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return prod(self.shape) * _ITEM_BYTES

    def array(self) -> NDArray[np.float32]:
        """Return the array (see `pixel_array`)."""
        return pixel_array(self.descriptor, self.shape)


def pixel_array(descriptor: int, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Return the array in shared memory; it stays valid after `descriptor` is closed."""
    return np.frombuffer(mmap.mmap(descriptor, prod(shape) * _ITEM_BYTES), np.float32).reshape(shape)
