"""KV cache of a layer: 16 or 32 bits in the layout of plain torch, or 8 bits.

An 8-bit cache is uint8 [pages, kv_heads, bytes]. Each page and head has keys [PAGE_SIZE, D], values [PAGE_SIZE, D],
then one float32 scale per key and per value. The scale maps the largest number of a token to 127.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from helexa.neuron.ops.constants import PAGE_SIZE

_SCALES = 2 * PAGE_SIZE * 4


def page_bytes(kv_heads: int, dim: int) -> int:
    """Return the bytes of a page of one layer in an 8-bit cache."""
    return kv_heads * (2 * PAGE_SIZE * dim + _SCALES)


def new_cache(kv_heads: int, pages: int, dim: int, device: torch.device) -> Tensor:
    """Return a zeroed 8-bit cache."""
    return torch.zeros((pages, kv_heads, page_bytes(1, dim)), dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Paged:
    """Address parameters of a cache: page * page_stride + head * head_stride + offset in the page * D.

    Kernels declare strides that grow with the cache as 64-bit integers. Otherwise Triton would choose the type by value
    and recompile for larger caches.

    Attributes:
        numbers: keys; the values of a position are `values_offset` numbers after its key.
        scales: scales of an 8-bit cache, from the same address on; None for other caches.
    """

    numbers: Tensor
    scales: Tensor | None
    kv_heads: int
    head_stride: int
    page_stride: int
    values_offset: int

    @classmethod
    def from_cache(cls, cache: Tensor) -> "Paged":
        """Return the address parameters of a cache."""
        if cache.dim() == 3:
            _, kv_heads, size = cache.shape
            strides = (size, kv_heads * size, (size - _SCALES) // 2)
            return cls(cache.view(torch.int8), cache.view(torch.float32), kv_heads, *strides)
        kv_heads, dim = cache.shape[1], cache.shape[3]
        return cls(cache, None, kv_heads, cache.stride(1), PAGE_SIZE * dim, cache.stride(0))
