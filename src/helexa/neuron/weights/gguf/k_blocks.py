"""Decode ggml's K types (Q2_K to Q8_K).

A block contains 256 codes in groups of 16 or 32. The scale of a group is the product of a small integer code and the
block's scale.

Arguments are uint8 tensors [blocks, n] with one row of n bytes per quantization block.
"""

from collections.abc import Callable

from helexa.neuron import tensors
from helexa.neuron.tensors import DType, Tensor
from helexa.neuron.weights.gguf.ggml_type import GgmlType
from helexa.neuron.weights.quantized_matrix import GroupScale, GroupwiseTensor


def half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 number at byte `at` of each K block, as float16 [blocks, 1]."""
    return reinterpret(blocks[:, at : at + 2], tensors.float16)


def reinterpret(blocks: Tensor, dtype: DType) -> Tensor:
    """Return the bytes [blocks, n] of K blocks as numbers of `dtype`."""
    # `view` needs aligned memory, and even a contiguous slice may be unaligned.
    return blocks.clone(memory_format=tensors.contiguous_format).view(dtype)


def nibbles(packed: Tensor, run: int) -> Tensor:
    """Unpack K blocks' bytes [blocks, n] into 4-bit codes [blocks, 2n], one per byte.

    Each group of `run` adjacent bytes yields the low nibbles of all its bytes first, and then their high nibbles.
    """
    runs = packed.unflatten(-1, (-1, run))
    return tensors.cat((runs & 0x0F, runs >> 4), dim=-1).flatten(1)


def planes(packed: Tensor, width: int) -> Tensor:
    """Unpack K blocks' bit planes [blocks, 32n] into codes [blocks, 32n * 8 / width].

    A code has `width` bits, and takes one byte of the result. Each group of 32 bytes holds bit planes. The lowest
    `width` bits of the 32 bytes are the first 32 codes, the next `width` bits are the next 32 codes, and so on.
    """
    shifts = tensors.arange(0, 8, width, dtype=tensors.uint8).unsqueeze(-1)
    runs = packed.unflatten(-1, (-1, 1, 32)) >> shifts
    return runs.bitwise_and_((1 << width) - 1).flatten(1)


def fields(packed: Tensor, width: int) -> Tensor:
    """Unpack K blocks' bytes [blocks, n] into `width`-bit codes [blocks, n*8/width].

    A code takes one byte of the result. The codes of a byte are adjacent in the result. The lowest bits of the byte are
    the first code.
    """
    shifts = tensors.arange(0, 8, width, dtype=tensors.uint8)
    return (packed.unsqueeze(-1) >> shifts).bitwise_and_((1 << width) - 1).flatten(1)


def _q2_k(blocks: Tensor) -> GroupwiseTensor:
    codes, small = planes(blocks[:, 16:80], 2), blocks[:, :16]
    # ggml subtracts the minimum; `GroupwiseTensor` adds it.
    scale, minimum = GroupScale(half(blocks, 80), small & 0x0F), GroupScale(-half(blocks, 82), small >> 4)
    return GroupwiseTensor(codes, scale, minimum, zero=0, bits=2, group_size=16)


def _q3_k(blocks: Tensor) -> GroupwiseTensor:
    codes = planes(blocks[:, 32:96], 2).bitwise_or_(planes(blocks[:, :32], 1).bitwise_left_shift_(2))
    # Twelve bytes hold 16 scales of 6 bits: low nibbles in the first eight bytes, upper two bits in the last four.
    low, high = nibbles(blocks[:, 96:104], 8), blocks[:, 104:108]
    upper = tensors.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    scale = GroupScale(half(blocks, 108), (low | upper << 4).view(tensors.int8) - 32)
    return GroupwiseTensor(codes, scale, None, zero=4, bits=3, group_size=16)


def _q4_k(blocks: Tensor) -> GroupwiseTensor:
    scale, minimum = _scale_and_minimum(blocks)
    return GroupwiseTensor(nibbles(blocks[:, 16:], 32), scale, minimum, zero=0, bits=4, group_size=32)


def _q5_k(blocks: Tensor) -> GroupwiseTensor:
    scale, minimum = _scale_and_minimum(blocks)
    codes = nibbles(blocks[:, 48:], 32).bitwise_or_(planes(blocks[:, 16:48], 1).bitwise_left_shift_(4))
    return GroupwiseTensor(codes, scale, minimum, zero=0, bits=5, group_size=32)


def _q6_k(blocks: Tensor) -> GroupwiseTensor:
    codes = nibbles(blocks[:, :128], 64).bitwise_or_(planes(blocks[:, 128:192], 2).bitwise_left_shift_(4))
    scale = GroupScale(half(blocks, 208), reinterpret(blocks[:, 192:208], tensors.int8))
    return GroupwiseTensor(codes, scale, None, zero=32, bits=6, group_size=16)


def _q8_k(blocks: Tensor) -> GroupwiseTensor:
    unit = reinterpret(blocks[:, :4], tensors.float32).expand(-1, 8).contiguous()  # one scale for eight groups
    return GroupwiseTensor(blocks[:, 4:260] ^ 0x80, GroupScale(unit), None, zero=128, bits=8, group_size=32)


# Decoder of each K type. It converts the blocks uint8 [blocks, bytes] to a matrix [blocks, 256], one row per block.
K_BLOCKS: dict[GgmlType, Callable[[Tensor], GroupwiseTensor]] = {
    GgmlType.Q2_K: _q2_k,
    GgmlType.Q3_K: _q3_k,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
    GgmlType.Q8_K: _q8_k,
}


def _scale_and_minimum(blocks: Tensor) -> tuple[GroupScale, GroupScale]:
    """Return the eight scales and eight minimums of each block of type Q4_K or Q5_K.

    Twelve bytes of a block hold the 6-bit codes of the scales and minimums:

    * The low 6 bits of bytes 0 to 3 are scales 0 to 3, and the low 6 bits of bytes 4 to 7 are minimums 0 to 3.
    * The low nibbles of bytes 8 to 11 are the low 4 bits of scales 4 to 7, and the high nibbles are the low 4 bits of
      minimums 4 to 7.
    * The upper two bits of bytes 0 to 3 are the upper bits of scales 4 to 7, and the upper two bits of bytes 4 to 7 are
      the upper bits of minimums 4 to 7.

    ggml subtracts minimums. The returned minimums are negated, because `GroupwiseTensor` adds them.
    """
    scales, minima, rest = blocks[:, 4:16].unflatten(-1, (3, 4)).unbind(1)
    scale = tensors.cat((scales & 0x3F, rest & 0x0F | scales >> 6 << 4), dim=-1)
    minimum = tensors.cat((minima & 0x3F, rest >> 4 | minima >> 6 << 4), dim=-1)
    return GroupScale(half(blocks, 0), scale), GroupScale(-half(blocks, 2), minimum)
