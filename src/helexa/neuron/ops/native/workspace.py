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
        self._blocks: dict[int, memoryview] = {}

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor, aligned to 64 bytes."""
        count = math.prod(shape)
        size = max(_LEAST, 1 << max(count * dtype.itemsize - 1, 0).bit_length())
        free = self._free[size]
        block = free.pop() if free else self._new(size)
        taken = self._lend(block, dtype)
        self._blocks[taken.data_ptr()] = block
        return taken[:count].view(shape)

    def take_again(self, address: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """A tensor where one lay before, uninitialised; None if that memory is held by somebody, or not from here."""
        block = self._blocks.get(address)
        if block is None:
            return None
        free = self._free[len(block)]
        place = next((i for i, other in enumerate(free) if other is block), None)
        return None if place is None else self._lend(free.pop(place), dtype)[: math.prod(shape)].view(shape)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is from here."""
        return tensor.untyped_storage().data_ptr() in self._blocks

    def spoil(self) -> None:
        """Fill what nobody holds with bytes that are no number in any float format."""
        for size, blocks in self._free.items():
            for block in blocks:
                block[:] = b"\xff" * size

    def _lend(self, block: memoryview, dtype: torch.dtype) -> Tensor:
        lease = memoryview(block)
        weakref.finalize(lease, self._free[len(block)].append, block).atexit = False
        return torch.frombuffer(lease, dtype=dtype)

    def _new(self, size: int) -> memoryview:
        if size >= _CHUNK:
            return memoryview(mmap.mmap(-1, size))
        if len(self._rest) < size:
            self._rest = memoryview(mmap.mmap(-1, _CHUNK))
        block, self._rest = self._rest[:size], self._rest[size:]
        return block
