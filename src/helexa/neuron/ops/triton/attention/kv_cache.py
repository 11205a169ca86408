"""The KV cache of a layer, in 16 or 32 bits as plain torch has it, or in 8.

In 8 bits it is uint8 [pages, kv_heads, bytes]: of each page and head the keys [PAGE_SIZE, D] and the values, then for
each of these a float32 that a byte is times of, so that the largest of a token's numbers is 127.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from helexa.neuron.ops.constants import PAGE_SIZE

_SCALES = 2 * PAGE_SIZE * 4


def page_bytes(kv_heads: int, dim: int) -> int:
    """Bytes of a page of one layer, in 8 bits."""
    return kv_heads * (2 * PAGE_SIZE * dim + _SCALES)


def new_cache(kv_heads: int, pages: int, dim: int, device: torch.device) -> Tensor:
    """A zeroed cache in 8 bits."""
    return torch.zeros((pages, kv_heads, page_bytes(1, dim)), dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Paged:
    """A cache as kernels address it: page * page_stride + head * head_stride + offset in the page * D.

    Kernels say that what grows with the cache has 64 bits. Else Triton would go by the number, and compile anew for a
    cache that is larger than the one that it met first.

    Attributes:
        numbers: keys; the values of a position lie `values_offset` behind its key.
        scales: of a cache of bytes, from the same address on.
    """

    numbers: Tensor
    scales: Tensor | None
    kv_heads: int
    head_stride: int
    page_stride: int
    values_offset: int

    @classmethod
    def of(cls, cache: Tensor) -> "Paged":
        """How a cache is addressed."""
        if cache.dim() == 3:
            _, kv_heads, size = cache.shape
            strides = (size, kv_heads * size, (size - _SCALES) // 2)
            return cls(cache.view(torch.int8), cache.view(torch.float32), kv_heads, *strides)
        kv_heads, dim = cache.shape[1], cache.shape[3]
        return cls(cache, None, kv_heads, cache.stride(1), PAGE_SIZE * dim, cache.stride(0))
