"""Layout of a layer's KV cache in the Triton kernels.

A cache of 16 or 32 bits has the layout of `ReferenceOps`. An 8-bit cache is uint8 [pages, kv_heads, bytes]. For each
page and head, it contains keys [PAGE_SIZE, D], values [PAGE_SIZE, D], one float32 scale per key, and one float32 scale
per value. The scale of a key or value maps its largest absolute number to 127.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from helexa.neuron.ops.constants import PAGE_SIZE

_SCALES = 2 * PAGE_SIZE * 4


def page_bytes(kv_heads: int, dim: int) -> int:
    """Return the number of bytes of one KV page in one layer of an 8-bit cache, for heads of dimension `dim`."""
    return kv_heads * (2 * PAGE_SIZE * dim + _SCALES)


def new_cache(kv_heads: int, pages: int, dim: int, device: torch.device) -> Tensor:
    """Return a zeroed 8-bit KV cache with `pages` pages for one layer."""
    return torch.zeros((pages, kv_heads, page_bytes(1, dim)), dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Paged:
    """A KV cache with the strides that kernels need to compute addresses.

    The key of a position is at page * page_stride + head * head_stride + (offset in the page) * D, for head dimension
    D. Kernels declare large strides as 64-bit integers. Otherwise Triton would choose the integer type by value, and
    recompile the kernels for larger caches.

    Attributes:
        numbers: the cache as a tensor of its number type.
        scales: an 8-bit cache viewed as float32, to read its scales; None for other caches.
        kv_heads: number of KV heads.
        head_stride: distance between two heads, in numbers.
        page_stride: distance between two pages, in numbers.
        values_offset: distance from the key to the value of a position, in numbers.
    """

    numbers: Tensor
    scales: Tensor | None
    kv_heads: int
    head_stride: int
    page_stride: int
    values_offset: int

    @classmethod
    def from_cache(cls, cache: Tensor) -> "Paged":
        """Return a KV cache with its strides: an 8-bit cache (3 dimensions), or one in the layout of `ReferenceOps`."""
        if cache.dim() == 3:
            _, kv_heads, size = cache.shape
            strides = (size, kv_heads * size, (size - _SCALES) // 2)
            return cls(cache.view(torch.int8), cache.view(torch.float32), kv_heads, *strides)
        kv_heads, dim = cache.shape[1], cache.shape[3]
        return cls(cache, None, kv_heads, cache.stride(1), PAGE_SIZE * dim, cache.stride(0))
