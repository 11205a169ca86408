"""From GGUF's stored bytes to weights: plain types become tensors, block types keep their codes and scales exactly.

A block is a stretch of codes along K behind its float16 scale. The K types pack 256 codes to a block and divide it into
groups, each with a few bits that multiply the block's scale.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from helexa.neuron.weights.formats import GroupScale, GroupwiseTensor, Weight
from helexa.neuron.weights.ggml_type import BLOCK_SIZES, GgmlType

PLAIN_TYPES = {GgmlType.F32: torch.float32, GgmlType.F16: torch.float16, GgmlType.BF16: torch.bfloat16}
"""The types that become plain tensors, and their torch types."""


def _q4_0(blocks: Tensor) -> GroupwiseTensor:
    return GroupwiseTensor(_nibbles(blocks[:, 2:], 16), _half(blocks, 0), None, zero=8, bits=4, group_size=32)


def _q4_1(blocks: Tensor) -> GroupwiseTensor:
    codes = _nibbles(blocks[:, 4:], 16)
    return GroupwiseTensor(codes, _half(blocks, 0), _half(blocks, 2), zero=0, bits=4, group_size=32)


def _q5_0(blocks: Tensor) -> GroupwiseTensor:
    codes = _nibbles(blocks[:, 6:], 16).bitwise_or_(_fifth_bits(blocks[:, 2:6]))
    return GroupwiseTensor(codes, _half(blocks, 0), None, zero=16, bits=5, group_size=32)


def _q5_1(blocks: Tensor) -> GroupwiseTensor:
    codes = _nibbles(blocks[:, 8:], 16).bitwise_or_(_fifth_bits(blocks[:, 4:8]))
    return GroupwiseTensor(codes, _half(blocks, 0), _half(blocks, 2), zero=0, bits=5, group_size=32)


def _q8_0(blocks: Tensor) -> GroupwiseTensor:
    codes = blocks[:, 2:] ^ 0x80  # flipping the sign bit adds 128 to a signed code
    return GroupwiseTensor(codes, _half(blocks, 0), None, zero=128, bits=8, group_size=32)


def _q4_k(blocks: Tensor) -> GroupwiseTensor:
    scale, minimum = _scale_and_minimum(blocks)
    return GroupwiseTensor(_nibbles(blocks[:, 16:], 32), scale, minimum, zero=0, bits=4, group_size=32)


def _q5_k(blocks: Tensor) -> GroupwiseTensor:
    scale, minimum = _scale_and_minimum(blocks)
    codes = _nibbles(blocks[:, 48:], 32).bitwise_or_(_high_bits(blocks[:, 16:48], bits=1))
    return GroupwiseTensor(codes, scale, minimum, zero=0, bits=5, group_size=32)


def _q6_k(blocks: Tensor) -> GroupwiseTensor:
    codes = _nibbles(blocks[:, :128], 64).bitwise_or_(_high_bits(blocks[:, 128:192], bits=2))
    scale = GroupScale(_half(blocks, 208).unit, blocks[:, 192:208].contiguous().view(torch.int8))
    return GroupwiseTensor(codes, scale, None, zero=32, bits=6, group_size=16)


# Each makes one row of one block.
_BLOCKS: dict[GgmlType, Callable[[Tensor], GroupwiseTensor]] = {
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q5_0: _q5_0,
    GgmlType.Q5_1: _q5_1,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
}

SUPPORTED_TYPES = frozenset(PLAIN_TYPES) | frozenset(_BLOCKS)
"""The types that `decode` reads."""


def decode(kind: GgmlType, stored: np.ndarray, shape: tuple[int, ...]) -> Weight:
    """The weight of `shape` in `stored`.

    Args:
        kind: one of `SUPPORTED_TYPES`.
        stored: uint8, a tensor's bytes as `GgufFile.read` gives them; plain types share this memory.
        shape: the tensor's shape; its last dimension is a whole number of blocks.
    """
    raw = torch.from_numpy(stored)
    if kind in PLAIN_TYPES:
        return raw.view(PLAIN_TYPES[kind]).view(shape)
    blocks = _BLOCKS[kind](raw.view(-1, BLOCK_SIZES[kind][1]))
    return blocks.each(lambda part: part.view(*shape[:-1], -1))


def _half(blocks: Tensor, at: int) -> GroupScale:
    return GroupScale(blocks[:, at : at + 2].contiguous().view(torch.float16))


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """[blocks, n] bytes -> [blocks, 2n] codes: of each `run` bytes the low nibbles come first, then the high ones."""
    runs = packed.unflatten(-1, (-1, run))
    return torch.cat((runs & 0x0F, runs >> 4), dim=-1).flatten(1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[blocks, 4] bytes, one bit per code from the lowest -> [blocks, 32], each 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (packed.unsqueeze(-1) >> shifts).bitwise_and_(1).bitwise_left_shift_(4).flatten(1)


def _high_bits(packed: Tensor, bits: int) -> Tensor:
    """What stands above the nibbles of the K types, [blocks, 32n] bytes -> [blocks, 256].

    The lowest `bits` of 32 bytes belong to 32 codes, the next ones to the 32 codes that follow, and so on.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(-1)
    runs = packed.unflatten(-1, (-1, 1, 32)) >> shifts
    return runs.bitwise_and_((1 << bits) - 1).bitwise_left_shift_(4).flatten(1)


def _scale_and_minimum(blocks: Tensor) -> tuple[GroupScale, GroupScale]:
    """The eight scales and minima of each block of Q4_K or Q5_K.

    Twelve bytes hold their 6-bit codes: four scales, four minima, then the low nibbles of the other four of each, whose
    upper two bits are those of the first eight bytes. The file subtracts a minimum; here it is added.
    """
    scales, minima, nibbles = blocks[:, 4:16].unflatten(-1, (3, 4)).unbind(1)
    scale = torch.cat((scales & 0x3F, nibbles & 0x0F | scales >> 6 << 4), dim=-1)
    minimum = torch.cat((minima & 0x3F, nibbles >> 4 | minima >> 6 << 4), dim=-1)
    return GroupScale(_half(blocks, 0).unit, scale), GroupScale(-_half(blocks, 2).unit, minimum)
