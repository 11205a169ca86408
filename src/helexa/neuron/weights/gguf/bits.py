"""How ggml packs several codes into one byte, and float16 numbers between them."""

import torch
from torch import Tensor


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 number of each block at byte `at`, uint8 [blocks, n] -> float16 [blocks, 1]."""
    return words(blocks[:, at : at + 2], torch.float16)


def words(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of each block as numbers of another type, [blocks, n] -> [blocks, n / its bytes]."""
    # Even a contiguous part may begin where a number of that type cannot.
    return blocks.clone(memory_format=torch.contiguous_format).view(dtype)


def nibbles(packed: Tensor, run: int) -> Tensor:
    """[blocks, n] bytes -> [blocks, 2n] codes: of each `run` bytes the low nibbles come first, then the high ones."""
    runs = packed.unflatten(-1, (-1, run))
    return torch.cat((runs & 0x0F, runs >> 4), dim=-1).flatten(1)


def planes(packed: Tensor, width: int) -> Tensor:
    """Codes of `width` bits, [blocks, 32n] bytes -> [blocks, 32n * 8 / width].

    The lowest bits of 32 bytes belong to 32 codes, the next ones to the 32 codes that follow, and so on.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).unsqueeze(-1)
    runs = packed.unflatten(-1, (-1, 1, 32)) >> shifts
    return runs.bitwise_and_((1 << width) - 1).flatten(1)


def fields(packed: Tensor, width: int) -> Tensor:
    """Codes of `width` bits that lie side by side, lowest first, [blocks, n] bytes -> [blocks, n * 8 / width]."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    return (packed.unsqueeze(-1) >> shifts).bitwise_and_((1 << width) - 1).flatten(1)
