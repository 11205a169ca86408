"""Allocator for the temporary tensors of a step, which reuses the memory of freed tensors."""

import math
import mmap
import weakref
from collections import defaultdict

import torch
from torch import Tensor

_LEAST = 64
_CHUNK = 1 << 20  # smaller buffers are cut from chunks of this size


class Workspace:
    """Allocator for temporary tensors. The memory of a tensor returns to a free list when its last view is freed.

    A captured graph uses the same memory in each replay, even though this memory is in the free list between replays.
    A tensor is therefore valid only until the next graph runs. Copy a tensor that is needed in later steps.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[memoryview]] = defaultdict(list)
        self._unused = memoryview(b"")
        self._blocks: dict[int, memoryview] = {}

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialized tensor of `shape` from the free list or from new memory."""
        count = math.prod(shape)
        size = max(_LEAST, 1 << max(count * dtype.itemsize - 1, 0).bit_length())
        free = self._free[size]
        block = free.pop() if free else self._new(size)
        tensor = self._lend(block, dtype)
        self._blocks[tensor.data_ptr()] = block
        return tensor[:count].view(shape)

    def take_again(self, address: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Return an uninitialized tensor at the address of an earlier tensor of this workspace.

        Returns:
            The tensor; None if the memory is in use, or if the workspace has returned no tensor at `address` before.
        """
        block = self._blocks.get(address)
        if block is None:
            return None
        free = self._free[len(block)]
        place = next((i for i, candidate in enumerate(free) if candidate is block), None)
        return None if place is None else self._lend(free.pop(place), dtype)[: math.prod(shape)].view(shape)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the memory of `tensor` belongs to this workspace."""
        return tensor.untyped_storage().data_ptr() in self._blocks

    def spoil(self) -> None:
        """Fill all free memory with bytes that are NaN in every float format, so that reads of old data yield NaN."""
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
        if len(self._unused) < size:
            self._unused = memoryview(mmap.mmap(-1, _CHUNK))
        block, self._unused = self._unused[:size], self._unused[size:]
        return block
