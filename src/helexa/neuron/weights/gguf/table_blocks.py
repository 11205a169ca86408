"""Decode ggml types whose codes are indexes into a table of values.

These types are IQ1 to IQ4, the ternary and binary types, MXFP4 and NVFP4. A table has at most 16 values, so a 4-bit
code represents each weight exactly.

IQ2 and IQ3 store the absolute values of several weights as one codebook entry, and the signs separately. The lower half
of an IQ2 or IQ3 table contains the positive values, and the upper half contains the same values with a minus sign. IQ1
stores a shift instead of signs. The lower half of the IQ1 table contains the values -1, 0 and 1 plus 1/8, and the upper
half contains the values -1, 0 and 1 minus 1/8.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from helexa.neuron.weights.formats import GroupScale, GroupwiseTensor
from helexa.neuron.weights.gguf.bits import fields, half, nibbles, planes, reinterpret
from helexa.neuron.weights.gguf.codebooks import codebook
from helexa.neuron.weights.gguf.ggml_type import GgmlType


def _table(*numbers: int) -> Tensor:
    return torch.tensor([*numbers, *[0] * (16 - len(numbers))], dtype=torch.int8)


def _both_signs(*numbers: int) -> Tensor:
    lower = [*numbers, *[0] * (8 - len(numbers))]
    return _table(*lower, *[-number for number in lower])


_IQ1 = _table(-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7)  # in units of 1/8: -1, 0 and 1, each shifted up or down by 1/8
_IQ2 = _both_signs(8, 25, 43)
_IQ3_XXS = _both_signs(4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S = _both_signs(1, 3, 5, 7, 9, 11, 13, 15)
_IQ4 = _table(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = _both_signs(0, 1, 2, 3, 4, 6, 8, 12)  # in units of 1/2
_TERNARY = _table(-1, 0, 1, 2)  # quantizers never write the 2
_BINARY = _table(-1, 1)

_POWERS_OF_TWO = torch.tensor([2.0 ** (exponent - 128) for exponent in range(256)])
_EVEN = torch.tensor([signs | signs.bit_count() % 2 << 7 for signs in range(128)], dtype=torch.uint8)
"""Sign bits of eight weights for each seven-bit code. The eighth bit makes the number of minus signs even."""


def _iq1_s(blocks: Tensor) -> GroupwiseTensor:
    high = reinterpret(blocks[:, 34:], torch.int16).int()
    entries = blocks[:, 2:34].unflatten(-1, (8, 4)).int() | (high[..., None] >> torch.arange(0, 12, 3) & 7) << 8
    down = (high >> 15 & 1).byte().repeat_interleave(32, dim=-1)
    scale = _odd(half(blocks, 0), high >> 12 & 7, 8)
    return _weights(_codes(GgmlType.IQ1_S, entries) | down << 3, scale, 32, _IQ1)


def _iq1_m(blocks: Tensor) -> GroupwiseTensor:
    halfwords = reinterpret(blocks[:, 48:], torch.int16).int()
    # The bits of the float16 scale are the upper nibbles of four words.
    unit = ((halfwords >> 12 & 15) << torch.arange(0, 16, 4)).sum(-1, keepdim=True).short().view(torch.float16)
    high = fields(blocks[:, 32:48], 4)
    codes = _codes(GgmlType.IQ1_S, blocks[:, :32].int() | (high & 7).int() << 8)
    small = (halfwords[..., None] >> torch.arange(0, 12, 3) & 7).flatten(1)
    return _weights(codes | (high & 8).repeat_interleave(8, dim=-1), _odd(unit, small, 8), 16, _IQ1)


def _iq2_xxs(blocks: Tensor) -> GroupwiseTensor:
    pairs = reinterpret(blocks[:, 2:], torch.int32).unflatten(-1, (8, 2))
    entries, signs_and_scale = reinterpret(pairs[..., 0], torch.uint8), pairs[..., 1]
    codes = _signed(_codes(GgmlType.IQ2_XXS, entries), _seven_bit_signs(signs_and_scale))
    return _weights(codes, _odd(half(blocks, 0), signs_and_scale >> 28 & 15, 8), 32, _IQ2)


def _iq2_xs(blocks: Tensor) -> GroupwiseTensor:
    entries = reinterpret(blocks[:, 2:66], torch.int16).int()
    codes = _signed(_codes(GgmlType.IQ2_XS, entries & 511), _EVEN[entries >> 9 & 127])
    return _weights(codes, _odd(half(blocks, 0), fields(blocks[:, 66:], 4), 8), 16, _IQ2)


def _iq2_s(blocks: Tensor) -> GroupwiseTensor:
    entries = blocks[:, 2:34].int() | fields(blocks[:, 66:74], 2).int() << 8
    codes = _signed(_codes(GgmlType.IQ2_S, entries), blocks[:, 34:66])
    return _weights(codes, _odd(half(blocks, 0), fields(blocks[:, 74:], 4), 8), 16, _IQ2)


def _iq3_xxs(blocks: Tensor) -> GroupwiseTensor:
    signs_and_scale = reinterpret(blocks[:, 66:], torch.int32)
    codes = _signed(_codes(GgmlType.IQ3_XXS, blocks[:, 2:66]), _seven_bit_signs(signs_and_scale))
    return _weights(codes, _odd(half(blocks, 0), signs_and_scale >> 28 & 15, 4), 32, _IQ3_XXS)


def _iq3_s(blocks: Tensor) -> GroupwiseTensor:
    entries = blocks[:, 2:66].int() | fields(blocks[:, 66:74], 1).int() << 8
    codes = _signed(_codes(GgmlType.IQ3_S, entries), blocks[:, 74:106])
    return _weights(codes, _odd(half(blocks, 0), fields(blocks[:, 106:], 4), 1), 32, _IQ3_S)


def _iq4_nl(blocks: Tensor) -> GroupwiseTensor:
    return _weights(nibbles(blocks[:, 2:], 16), GroupScale(half(blocks, 0)), 32, _IQ4)


def _iq4_xs(blocks: Tensor) -> GroupwiseTensor:
    small = fields(blocks[:, 4:8], 4) | fields(blocks[:, 2:4], 2) << 4
    scale = GroupScale(half(blocks, 0), small.view(torch.int8) - 32)
    return _weights(nibbles(blocks[:, 8:], 16), scale, 32, _IQ4)


def _tq1_0(blocks: Tensor) -> GroupwiseTensor:
    """Decode TQ1_0, in which a byte holds up to five ternary digits.

    A byte, divided by 256, is a fraction in base 3. `byte * 3 >> 8` is the first digit of the fraction.
    """
    runs = [(blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)]
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)
    # The uint8 product overflows on purpose: it drops the digits before the current digit.
    remainders = [(run[:, None] * powers[:digits, None]).flatten(1) for run, digits in runs]
    codes = (torch.cat(remainders, dim=-1).short() * 3 >> 8).byte()
    return _weights(codes, _repeat(half(blocks, 52), 8), 32, _TERNARY)


def _tq2_0(blocks: Tensor) -> GroupwiseTensor:
    return _weights(planes(blocks[:, :64], 2), _repeat(half(blocks, 64), 8), 32, _TERNARY)


def _q1_0(blocks: Tensor) -> GroupwiseTensor:
    return _weights(fields(blocks[:, 2:], 1), _repeat(half(blocks, 0), 4), 32, _BINARY)


def _mxfp4(blocks: Tensor) -> GroupwiseTensor:
    codes, unit = nibbles(blocks[:, 1:], 16), _POWERS_OF_TWO[blocks[:, :1].int()]
    narrow = unit.half()
    inexact = (narrow.float() != unit).squeeze(-1)
    representable = not (codes[inexact] & 7).any()  # the scale of a group of zeros is irrelevant
    return _weights(codes, GroupScale(narrow if representable else unit), 32, _FP4)


def _nvfp4(blocks: Tensor) -> GroupwiseTensor:
    unit = reinterpret(blocks[:, :4] & 0x7F, torch.float8_e4m3fn).half().nan_to_num_(0) / 2
    return _weights(nibbles(blocks[:, 4:], 8), GroupScale(unit), 16, _FP4)


TABLE_BLOCKS: dict[GgmlType, Callable[[Tensor], GroupwiseTensor]] = {
    GgmlType.IQ1_S: _iq1_s,
    GgmlType.IQ1_M: _iq1_m,
    GgmlType.IQ2_XXS: _iq2_xxs,
    GgmlType.IQ2_XS: _iq2_xs,
    GgmlType.IQ2_S: _iq2_s,
    GgmlType.IQ3_XXS: _iq3_xxs,
    GgmlType.IQ3_S: _iq3_s,
    GgmlType.IQ4_NL: _iq4_nl,
    GgmlType.IQ4_XS: _iq4_xs,
    GgmlType.TQ1_0: _tq1_0,
    GgmlType.TQ2_0: _tq2_0,
    GgmlType.Q1_0: _q1_0,
    GgmlType.MXFP4: _mxfp4,
    GgmlType.NVFP4: _nvfp4,
}
"""Decoder of each type. It converts uint8 [blocks, bytes] to a matrix [blocks, weights], one row per block."""


def _weights(codes: Tensor, scale: GroupScale, group_size: int, table: Tensor) -> GroupwiseTensor:
    return GroupwiseTensor(codes, scale, None, zero=0, bits=4, group_size=group_size, table=table)


def _codes(kind: GgmlType, entries: Tensor) -> Tensor:
    """Look up codebook entries by their indexes `entries` and return their codes, uint8 [blocks, 256]."""
    return codebook(kind)[entries.flatten(1).int()].view(torch.uint8)


def _signed(codes: Tensor, signs: Tensor) -> Tensor:
    """Add 8 to the codes [blocks, 256] of negative weights, which selects the upper half of the table.

    Args:
        codes: table indexes from 0 to 7.
        signs: uint8 [blocks, 32], one bit per weight. A set bit is a minus sign.
    """
    return codes | fields(signs, 1) << 3


def _seven_bit_signs(packed: Tensor) -> Tensor:
    """Return the sign bits of 256 weights per block, uint8 [blocks, 32].

    Args:
        packed: int32 [blocks, 8]. The low 28 bits of an integer are four seven-bit codes, each for eight weights.
    """
    return _EVEN[packed[..., None] >> torch.arange(0, 28, 7) & 127].flatten(1)


def _odd(unit: Tensor, small: Tensor, divisor: int) -> GroupScale:
    """Return the scales `unit * (2 * small + 1) / divisor`.

    The division uses float32, because float16 would lose bits.
    """
    exact = unit if divisor == 1 else unit.float() / divisor
    return GroupScale(exact, (2 * small + 1).byte())


def _repeat(unit: Tensor, groups: int) -> GroupScale:
    return GroupScale(unit.expand(-1, groups).contiguous())
