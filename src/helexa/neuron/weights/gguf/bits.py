"""Unpack ggml's bit fields and float16 numbers from bytes."""

import torch
from torch import Tensor


def half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 number of each block at byte `at`, uint8 [blocks, n] -> float16 [blocks, 1]."""
    return reinterpret(blocks[:, at : at + 2], torch.float16)


def reinterpret(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret the bytes of each block as another dtype, [blocks, n] -> [blocks, n / itemsize]."""
    # `view` needs aligned memory, and even a contiguous slice may be unaligned.
    return blocks.clone(memory_format=torch.contiguous_format).view(dtype)


def nibbles(packed: Tensor, run: int) -> Tensor:
    """Unpack 4-bit codes, [blocks, n] bytes -> [blocks, 2n].

    Each `run` of adjacent bytes yields its low nibbles first, then its high nibbles.
    """
    runs = packed.unflatten(-1, (-1, run))
    return torch.cat((runs & 0x0F, runs >> 4), dim=-1).flatten(1)


def planes(packed: Tensor, width: int) -> Tensor:
    """Unpack codes of `width` bits, [blocks, 32n] bytes -> [blocks, 32n * 8 / width].

    The lowest bits of 32 bytes are the first 32 codes, the next bits are the following 32 codes, and so on.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).unsqueeze(-1)
    runs = packed.unflatten(-1, (-1, 1, 32)) >> shifts
    return runs.bitwise_and_((1 << width) - 1).flatten(1)


def fields(packed: Tensor, width: int) -> Tensor:
    """Unpack adjacent codes of `width` bits, lowest first, [blocks, n] bytes -> [blocks, n * 8 / width]."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    return (packed.unsqueeze(-1) >> shifts).bitwise_and_((1 << width) - 1).flatten(1)
