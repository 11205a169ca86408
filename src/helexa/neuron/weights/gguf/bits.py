"""Unpack the bit fields and float16 numbers of ggml's quantization blocks.

Arguments are uint8 tensors [blocks, n] with one row of n bytes per quantization block.
"""

import torch
from torch import Tensor


def half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 number at byte `at` of each block, as float16 [blocks, 1]."""
    return reinterpret(blocks[:, at : at + 2], torch.float16)


def reinterpret(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes [blocks, n] of each block as numbers of `dtype`, [blocks, n / itemsize]."""
    # `view` needs aligned memory, and even a contiguous slice may be unaligned.
    return blocks.clone(memory_format=torch.contiguous_format).view(dtype)


def nibbles(packed: Tensor, run: int) -> Tensor:
    """Unpack bytes [blocks, n] into 4-bit codes [blocks, 2n], one code per byte.

    Each group of `run` adjacent bytes yields the low nibbles of all its bytes first, and then their high nibbles.
    """
    runs = packed.unflatten(-1, (-1, run))
    return torch.cat((runs & 0x0F, runs >> 4), dim=-1).flatten(1)


def planes(packed: Tensor, width: int) -> Tensor:
    """Unpack bytes [blocks, 32n] into codes of `width` bits, [blocks, 32n * 8 / width], one code per byte.

    Each group of 32 bytes holds bit planes. The lowest `width` bits of the 32 bytes are the first 32 codes, the next
    `width` bits are the next 32 codes, and so on.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).unsqueeze(-1)
    runs = packed.unflatten(-1, (-1, 1, 32)) >> shifts
    return runs.bitwise_and_((1 << width) - 1).flatten(1)


def fields(packed: Tensor, width: int) -> Tensor:
    """Unpack bytes [blocks, n] into codes of `width` bits, [blocks, n * 8 / width], one code per byte.

    The codes of a byte are adjacent in the result. The lowest bits of the byte are the first code.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    return (packed.unsqueeze(-1) >> shifts).bitwise_and_((1 << width) - 1).flatten(1)
