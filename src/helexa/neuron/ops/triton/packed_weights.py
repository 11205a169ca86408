"""Quantized matrices in the layout of the Triton kernels."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from helexa.neuron.weights.quantized_matrix import GroupwiseTensor

LANES = 4  # Number of 32-bit words that a thread reads at a time; also the number of rows with adjacent scales

_LARGEST_GROUP = 128
_ROUNDING = 2.0**-11  # relative rounding error of float16


@dataclass(frozen=True)
class PackedMatrix:
    """A quantized matrix [rows, columns] in the layout of the Triton kernels.

    A weight is `scale * (code - zero)`, `scale * code + minimum` or `scale * table[code]`, depending on the format.
    Codes are packed into 32-bit words: 8 codes of 4 bits, the lower 4 bits of 8 codes of 6 bits, or 4 codes of 8 bits.
    In each chunk of four words, code i of word w belongs to column 4 * i + w of the chunk. A thread that reads a chunk
    (16 bytes) therefore has the codes of adjacent columns.
    """

    words: Tensor  # int32 [N, K / codes per word]
    # int16 [N, K / 8], the upper 2 bits of 6-bit codes, 8 codes per number in the order of `words`; None for other
    # codes
    high: Tensor | None
    # Float [ceil(N / 4), G, 4], one scale per row and group of columns, for G groups. The scales of four rows are
    # adjacent.
    scale: Tensor
    minimum: Tensor | None  # minimums in the layout of `scale`; None in formats without minimums
    zero: int  # code of the value 0 in formats without minimums
    bits: int  # bits per code: 4, 6 or 8
    group_size: int  # number of columns that share a scale: 16, 32, 64 or 128
    table: Tensor | None  # float32 [16], values of the 4-bit codes; None in formats without a table

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows N and number of columns K of the matrix."""
        return self.words.shape[0], self.words.shape[1] * fields(self.bits)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the packed matrix, without the small table."""
        return sum(tensor.nbytes for tensor in (self.words, self.high, self.scale, self.minimum) if tensor is not None)


def fields(bits: int) -> int:
    """Return the number of codes of `bits` bits per 32-bit word of a packed matrix."""
    return 4 if bits == 8 else 8


def pack(weight: GroupwiseTensor) -> PackedMatrix | None:
    """Return a quantized weight in the Triton kernels' layout, with the same codes.

    The result is on the weight's device. It is None if the kernels do not support the weight's shape or group size. If
    the weight stores scales as codes with a shared unit, the result contains the products of codes and units.
    """
    layout = _layout(weight)
    if layout is None:
        return None
    bits, group = layout
    scale, minimum = weight.scale.values(), None
    if weight.minimum is not None:
        minimum = weight.minimum.values() - weight.zero * scale
    dtype = _dtype([numbers for numbers in (scale, minimum) if numbers is not None])
    repeats = weight.group_size // group
    return PackedMatrix(
        words=_words(weight.codes, bits),
        high=_high(weight.codes) if bits == 6 else None,
        scale=_by_fours(scale, repeats, dtype),
        minimum=None if minimum is None else _by_fours(minimum, repeats, dtype),
        zero=0 if minimum is not None else weight.zero,
        bits=bits,
        group_size=group,
        table=None if weight.table is None else weight.table.float(),
    )


def packed_bytes(weight: GroupwiseTensor) -> int | None:
    """Return the bytes of a matrix in the Triton layout; None if `pack` returns None.

    The weight may be on torch's meta device. The result assumes 16-bit scales.
    """
    layout = _layout(weight)
    if layout is None:
        return None
    (rows, columns), (bits, group) = weight.shape, layout
    scales = -(-rows // LANES) * LANES * (columns // group) * (1 if weight.minimum is None else 2)
    return rows * columns * bits // 8 + scales * torch.float16.itemsize


def _layout(weight: GroupwiseTensor) -> tuple[int, int] | None:
    """Return bits per code and columns per scale after packing; None if impossible."""
    columns = weight.shape[1]
    bits = {2: 4, 3: 4, 4: 4, 5: 6, 6: 6, 8: 8}[weight.bits]
    if columns % (LANES * fields(bits)):
        bits = 8
    group = math.gcd(weight.group_size, _LARGEST_GROUP)
    if columns % (LANES * fields(bits)) or group < 16 or (bits == 8 and weight.table is not None):
        return None
    return bits, group


def alike(matrices: Sequence[PackedMatrix]) -> bool:
    """Return whether `join` supports these matrices' formats and numbers of rows."""
    first, *remaining = matrices
    # The scales of four rows are adjacent, so all matrices except the last must have a multiple of 4 rows.
    return all(matrix.shape[0] % LANES == 0 for matrix in matrices[:-1]) and all(
        _same_format(first, matrix) for matrix in remaining
    )


def join(matrices: Sequence[PackedMatrix]) -> PackedMatrix:
    """Return one packed matrix with the rows of all matrices, which must be `alike`."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    dtype = functools.reduce(torch.promote_types, (matrix.scale.dtype for matrix in matrices))
    highs = [matrix.high for matrix in matrices if matrix.high is not None]
    minima = [matrix.minimum for matrix in matrices if matrix.minimum is not None]
    return replace(
        first,
        words=torch.cat([matrix.words for matrix in matrices]),
        high=torch.cat(highs) if highs else None,
        scale=torch.cat([matrix.scale.to(dtype) for matrix in matrices]),
        minimum=torch.cat([minimum.to(dtype) for minimum in minima]) if minima else None,
    )


def _same_format(first: PackedMatrix, second: PackedMatrix) -> bool:
    def format_of(matrix: PackedMatrix) -> tuple[object, ...]:
        return matrix.shape[1], matrix.bits, matrix.group_size, matrix.zero, matrix.minimum is not None

    if first.table is None or second.table is None:
        return format_of(first) == format_of(second) and first.table is second.table
    return format_of(first) == format_of(second) and torch.equal(first.table, second.table)


def _words(codes: Tensor, bits: int) -> Tensor:
    rows, columns = codes.shape
    chunks = codes.view(rows, -1, fields(bits), LANES)
    width, mask = 32 // fields(bits), (1 << 32 // fields(bits)) - 1
    words = torch.zeros((rows, columns // (LANES * fields(bits)), LANES), dtype=torch.int32, device=codes.device)
    for field in range(fields(bits)):
        words |= (chunks[:, :, field] & mask).int() << width * field
    return words.flatten(1)


def _high(codes: Tensor) -> Tensor:
    chunks = codes.view(codes.shape[0], -1, 8, LANES)
    high = torch.zeros((*chunks.shape[:2], LANES), dtype=torch.int32, device=codes.device)
    for field in range(8):
        high |= (chunks[:, :, field] >> 4).int() << 2 * field
    return high.to(torch.int16).flatten(1)


def _by_fours(values: Tensor, repeats: int, dtype: torch.dtype) -> Tensor:
    """Return scales [N, G] as in `PackedMatrix.scale`, [ceil(N / 4), G * repeats, 4].

    Each number is repeated for the `repeats` smaller groups into which packing divides a group.
    """
    values = F.pad(values.to(dtype), (0, 0, 0, -values.shape[0] % LANES))
    return values.repeat_interleave(repeats, 1).unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()


def _dtype(numbers: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype for scales and minimums: bfloat16, float16 or float32."""
    # bfloat16 if it represents all numbers exactly, else float16 if it is precise enough, else float32
    if all(torch.equal(tensor.bfloat16().float(), tensor) for tensor in numbers):
        return torch.bfloat16
    for tensor in numbers:
        slack = tensor.abs().amax() * _ROUNDING / 8
        if not bool(((tensor.half().float() - tensor).abs() <= tensor.abs() * _ROUNDING + slack).all()):
            return torch.float32
    return torch.float16
