"""Memory for what lives within a step: buffers that are used again as soon as nobody holds them."""

import math
import mmap
import weakref
from collections import defaultdict

import torch
from torch import Tensor

_LEAST = 64
_CHUNK = 1 << 20  # smaller buffers are cut from chunks of this size


class Workspace:
    """Tensors whose memory goes back to a free list when the last view of them dies.

    A recorded tape may go on using memory that has gone back: whatever is recorded later runs at another time.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[memoryview]] = defaultdict(list)
        self._rest = memoryview(b"")
        self._addresses: set[int] = set()

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor, aligned to 64 bytes."""
        count = math.prod(shape)
        size = max(_LEAST, 1 << max(count * dtype.itemsize - 1, 0).bit_length())
        free = self._free[size]
        block = free.pop() if free else self._new(size)
        lease = memoryview(block)
        weakref.finalize(lease, free.append, block).atexit = False
        taken = torch.frombuffer(lease, dtype=dtype)
        self._addresses.add(taken.data_ptr())
        return taken[:count].view(shape)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is from here."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def spoil(self) -> None:
        """Fill what nobody holds with bytes that are no number in any float format."""
        for size, blocks in self._free.items():
            for block in blocks:
                block[:] = b"\xff" * size

    def _new(self, size: int) -> memoryview:
        if size >= _CHUNK:
            return memoryview(mmap.mmap(-1, size))
        if len(self._rest) < size:
            self._rest = memoryview(mmap.mmap(-1, _CHUNK))
        block, self._rest = self._rest[:size], self._rest[size:]
        return block
