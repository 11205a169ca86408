"""Matrix products of single input rows, for decode steps.

The memory bandwidth of the GPU limits the speed of these products. A program computes four outputs from four complete
rows of a matrix, so no second kernel must add partial sums. The threads of the program divide the columns, and each
thread reads 16 bytes of each row at a time.

A quantized code is converted to float32 without a conversion instruction: its bits become the mantissa of a subnormal
number, which equals the code times a power of two. GPUs multiply subnormal numbers exactly and at full speed. Compiled
for sm_90 by Triton 3.6 and 3.9, a 4-bit code takes 3.8 instructions in total, a 6-bit code 6.5 and an 8-bit code 4.3.
"""
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from helexa.neuron.ops.triton.launch_and_graphs import launch
from helexa.neuron.ops.triton.packed_weights import LANES as _LANES
from helexa.neuron.ops.triton.packed_weights import PackedMatrix, fields

LANES = constexpr(_LANES)
ROWS = constexpr(4)  # matrix rows per program: the rows whose scales are adjacent

# Factor of partial sums. Inputs up to about 2 ** 64 do not overflow float32 when `_products` multiplies them by
# 2 ** 149 * TINY, and usual sums do not underflow.
TINY = constexpr(2.0**-85)

_MOST_WARPS = 4
_PLAIN = 8  # 16-bit numbers that a thread reads at a time
_WASTE = 1.25  # maximum ratio of all threads, also idle ones, to threads with work (see `_warps`)


def multiply_rows(
    x: Tensor,
    matrix: PackedMatrix | Tensor,
    bias: Tensor | None,
    out: Tensor,
    experts: Tensor | None = None,
) -> None:
    """Compute `out = x @ matrix.T + bias`, each row separately.

    Args:
        x: [T, inputs], contiguous. In a mixture with n selected experts per row, x may have T / n rows. Each row of x
            is then used for n consecutive rows of `out`, one per selected expert.
        matrix: [outputs, inputs]; with `experts`, [E * outputs, inputs], the stacked matrices of E experts.
        bias: float32, one number per row of the matrix; None for no bias.
        out: [T, outputs]; each row must be contiguous.
        experts: int32 [T], the expert of each row of `out`; None if one matrix is used for all rows.
    """
    rows, outputs = out.shape
    columns, share = x.shape[1], rows // max(x.shape[0], 1)
    # The grid has one dimension, because the second and third dimension allow only 65535 programs.
    grid = (rows * -(-outputs // ROWS.value),)
    if isinstance(matrix, Tensor):
        pieces = columns // _PLAIN
        warps = _warps(pieces)
        arguments = (x, matrix, bias, experts, out, out.stride(0), rows, outputs, pieces, share)
        launch(_plain, grid, *arguments, warps=warps, COLUMNS=32 * warps * _PLAIN)
        return
    pieces = columns // (_LANES * fields(matrix.bits))
    warps = _warps(pieces)
    tensors = (matrix.words, matrix.high, matrix.scale, matrix.minimum, matrix.table)
    arguments = (x, *tensors, bias, experts, out, out.stride(0), rows, outputs, pieces, share)
    constants = {"BITS": matrix.bits, "GROUP": matrix.group_size, "ZERO": matrix.zero}
    launch(_packed, grid, *arguments, warps=warps, CHUNKS=32 * warps, **constants)


def _warps(threads: int) -> int:
    """Return a number of warps that leaves few threads idle in the last iteration.

    A thread reads one of the `threads` 16-byte pieces of a matrix row per loop iteration.
    """
    warps = _MOST_WARPS
    while warps > 1 and -(-threads // (32 * warps)) * 32 * warps > _WASTE * threads:
        warps //= 2
    return warps


@triton.jit
def _products(words, numbers, FIRST: constexpr, WIDTH: constexpr, FACTOR: constexpr):
    """Return the products of `numbers` and the codes in `words`, times FACTOR * TINY.

    Each word contains several codes. The function uses the code of WIDTH bits that starts at bit FIRST, and that must
    lie in the lowest 23 bits: a caller shifts the words for other codes. The factor TINY keeps sums of products in the
    range of float32.
    """
    codes = (words & (((1 << WIDTH) - 1) << FIRST)).to(tl.float32, bitcast=True)  # times 2 ** (FIRST - 149)
    codes = tl.reshape(codes, [words.shape[0] // (numbers.shape[0] * LANES), numbers.shape[0], LANES])
    return codes * (numbers * (FACTOR * TINY * 2.0**149 / (1 << FIRST)))[None, :, :]


@triton.jit(do_not_specialize=["T"])
def _packed(
    x, words, high, scale, minimum, table, bias, experts, out, out_stride, T, N, pieces, share,
    CHUNKS: constexpr, BITS: constexpr, GROUP: constexpr, ZERO: constexpr,
):  # fmt: skip
    FIELDS: constexpr = 4 if BITS == 8 else 8
    WIDTH: constexpr = 32 // FIELDS
    BELOW: constexpr = 23 // WIDTH  # fields that fit in a mantissa
    CHUNK: constexpr = LANES * FIELDS  # columns
    PARTS: constexpr = CHUNK // GROUP if CHUNK > GROUP else 1  # parts of a chunk, each within one group
    PER_GROUP: constexpr = GROUP // CHUNK if GROUP > CHUNK else 1  # chunks per group
    K = pieces * CHUNK
    row = tl.program_id(0) % T  # adjacent programs read the same part of the matrix
    quad = tl.program_id(0) // T
    x += (row // share).to(tl.int64) * K
    if experts is not None:
        expert = tl.load(experts + row).to(tl.int64)
        words += expert * N * (pieces * LANES)
        if BITS == 6:
            high += expert * N * (pieces * LANES)
        scale += expert * N * (K // GROUP)
        if minimum is not None:
            minimum += expert * N * (K // GROUP)
        if bias is not None:
            bias += expert * N
    fours = tl.arange(0, ROWS)
    outputs = quad * ROWS + fours
    lane = tl.arange(0, LANES)
    place = tl.arange(0, ROWS * CHUNKS * LANES)  # one dimension fixes the assignment of elements to threads
    at_row = tl.minimum(quad * ROWS + place // (CHUNKS * LANES), N - 1) * (pieces * LANES)
    total = tl.zeros([ROWS, CHUNKS], tl.float32)
    for first in range(0, pieces, CHUNKS):
        word = first * LANES + place % (CHUNKS * LANES)
        # Words after the end of a row are undefined, but their codes are finite numbers and have a scale of 0.
        code_words = tl.load(words + (at_row + word), word < pieces * LANES)
        upper = code_words
        if BITS == 6:
            word = first * LANES + tl.arange(0, CHUNKS * LANES)
            by_fours = word // LANES * LANES + word % LANES  # a thread gets the upper bits for the words that it has
            at = tl.minimum(outputs, N - 1)[:, None] * (pieces * LANES) + by_fours[None, :]
            upper = tl.load(high + at, (word < pieces * LANES)[None, :]).to(tl.int32)
            upper = tl.reshape(upper, [ROWS * CHUNKS * LANES])
        within = first + tl.arange(0, CHUNKS) < pieces
        chunk = tl.minimum(first + tl.arange(0, CHUNKS), pieces - 1)
        for number in tl.static_range(PARTS):
            partial_sums = tl.zeros([ROWS, CHUNKS, LANES], tl.float32)
            ones = tl.zeros([CHUNKS, LANES], tl.float32)
            for field in tl.static_range(number * FIELDS // PARTS, (number + 1) * FIELDS // PARTS):
                numbers = tl.load(x + (chunk[:, None] * CHUNK + LANES * field + lane[None, :])).to(tl.float32)
                if table is not None:
                    looked_up = tl.load(table + ((code_words >> (4 * field)) & 15))
                    partial_sums += tl.reshape(looked_up, [ROWS, CHUNKS, LANES]) * numbers[None, :, :]
                else:
                    shifted = code_words if field < BELOW else code_words >> WIDTH * BELOW
                    partial_sums += _products(shifted, numbers, WIDTH * (field % BELOW), WIDTH, 1)
                    if BITS == 6:
                        partial_sums += _products(upper, numbers, 2 * field, 2, 16)
                    ones += numbers
            group = (quad * (K // GROUP) + (chunk * PARTS + number) // PER_GROUP)[None, :] * LANES + fours[:, None]
            scales = tl.load(scale + group, within[None, :], 0.0).to(tl.float32)
            sums = tl.sum(partial_sums, 2)
            if table is None:
                sums = sums * (1 / TINY)
                x_sum = tl.sum(ones, 1)[None, :]
                if minimum is not None:
                    total += tl.load(minimum + group, within[None, :], 0.0).to(tl.float32) * x_sum
                else:
                    sums -= x_sum * ZERO
            total += scales * sums
    result = tl.sum(total, 1)
    if bias is not None:
        result += tl.load(bias + outputs, outputs < N, 0.0)
    tl.store(out + row.to(tl.int64) * out_stride + outputs, result.to(out.dtype.element_ty), outputs < N)


@triton.jit(do_not_specialize=["T"])
def _plain(x, matrix, bias, experts, out, out_stride, T, N, pieces, share, COLUMNS: constexpr):
    K = pieces * 8
    row = tl.program_id(0) % T
    x += (row // share).to(tl.int64) * K
    if experts is not None:
        expert = tl.load(experts + row).to(tl.int64)
        matrix += expert * N * K
        if bias is not None:
            bias += expert * N
    outputs = tl.program_id(0) // T * ROWS + tl.arange(0, ROWS)
    matrix_rows = tl.minimum(outputs, N - 1)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, K, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        numbers = tl.load(x + columns, columns < K, 0.0).to(tl.float32)
        weights = tl.load(
            matrix + matrix_rows[:, None] * (pieces * 8) + columns[None, :], (columns < K)[None, :], 0.0
        ).to(tl.float32)
        total += weights * numbers[None, :]
    result = tl.sum(total, 1)
    if bias is not None:
        result += tl.load(bias + matrix_rows)
    tl.store(out + row.to(tl.int64) * out_stride + outputs, result.to(out.dtype.element_ty), outputs < N)
