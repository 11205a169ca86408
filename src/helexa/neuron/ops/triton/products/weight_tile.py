"""Function that reads and dequantizes a tile of a weight matrix, for the kernels that multiply or write tiles."""
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl
from triton.language import constexpr

from helexa.neuron.ops.triton.products.packed import LANES as _LANES

LANES = constexpr(_LANES)


@triton.jit
def weight_tile(
    words, high, scale, minimum, table, rows, first, pieces, dtype: constexpr,
    COLUMNS: constexpr, BITS: constexpr, GROUP: constexpr, ZERO: constexpr,
) -> tl.tensor:  # fmt: skip
    """Return a dequantized tile [R, COLUMNS] of a matrix: COLUMNS columns of R rows, starting at column `first`.

    Columns after the last column of the matrix are 0.

    Args:
        words: `PackedMatrix.words`; if BITS is 16, the plain matrix.
        rows: int32 [R], indexes of the rows, which must exist.
        first: index of the first column, a multiple of COLUMNS.
        pieces: number of 16-byte pieces per matrix row. From this argument, the compiler concludes that rows are
            aligned to 16 bytes.
    """
    if BITS == 16:
        columns = first + tl.arange(0, COLUMNS)
        at = rows[:, None] * (pieces * 8) + columns[None, :]
        tile = tl.load(words + at, (columns < pieces * 8)[None, :], 0.0).to(dtype)
    else:
        tile = _unpacked(words, high, scale, minimum, table, rows, first, pieces, COLUMNS, BITS, GROUP, ZERO).to(dtype)
    return tile


@triton.jit
def _unpacked(
    words, high, scale, minimum, table, rows, first, pieces,
    COLUMNS: constexpr, BITS: constexpr, GROUP: constexpr, ZERO: constexpr,
):  # fmt: skip
    FIELDS: constexpr = 4 if BITS == 8 else 8
    K = pieces * (LANES * FIELDS)
    WIDTH: constexpr = 32 // FIELDS
    CHUNKS: constexpr = COLUMNS // (LANES * FIELDS)
    GROUPS: constexpr = COLUMNS // GROUP if COLUMNS > GROUP else 1
    word = first // FIELDS + tl.arange(0, COLUMNS // FIELDS)
    at = rows[:, None] * (pieces * LANES) + word[None, :]
    within = (word < pieces * LANES)[None, :]
    shape: constexpr = [rows.shape[0], CHUNKS, 1, LANES]
    field = tl.arange(0, FIELDS)[None, None, :, None]
    codes = (tl.reshape(tl.load(words + at, within, 0), shape) >> (WIDTH * field)) & ((1 << WIDTH) - 1)
    if BITS == 6:
        upper = tl.reshape(tl.load(high + at, within, 0).to(tl.int32), shape)
        codes = codes | (((upper >> (2 * field)) & 3) << 4)
    codes = tl.reshape(codes, [rows.shape[0], GROUPS, COLUMNS // GROUPS])
    numbers = tl.load(table + codes) if table is not None else (codes - ZERO).to(tl.float32)
    group = first // GROUP + tl.arange(0, GROUPS)
    at = ((rows // LANES)[:, None] * (K // GROUP) + group[None, :]) * LANES + (rows % LANES)[:, None]
    within = (group < K // GROUP)[None, :]
    numbers *= tl.load(scale + at, within, 0.0).to(tl.float32)[:, :, None]
    if minimum is not None:
        numbers += tl.load(minimum + at, within, 0.0).to(tl.float32)[:, :, None]
    return tl.reshape(numbers, [rows.shape[0], COLUMNS])
