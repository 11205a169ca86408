"""Dequantize packed matrices: rows for embeddings and cuBLAS, tiles for products."""
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from helexa.neuron.ops.triton.launch_and_graphs import launch
from helexa.neuron.ops.triton.packed_weights import LANES, PackedMatrix, fields

_LANES = constexpr(LANES)

_ROWS, _COLUMNS = 16, 256


@triton.jit
def weight_tile(
    words, high, scale, minimum, table, rows, first, pieces, dtype: constexpr,
    COLUMNS: constexpr, BITS: constexpr, GROUP: constexpr, ZERO: constexpr,
) -> tl.tensor:  # fmt: skip
    """Return a dequantized tile [R, COLUMNS] of R rows, from column `first` on.

    Columns after the last column of the matrix are 0.

    Args:
        words: `PackedMatrix.words`; if BITS is 16, the plain matrix.
        rows: int32 [R], indexes of the rows, which must exist.
        first: index of the first column, a multiple of COLUMNS.
        pieces: number of 16-byte pieces per matrix row, which tells the compiler that rows are aligned to 16 bytes.
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
    K = pieces * (_LANES * FIELDS)
    WIDTH: constexpr = 32 // FIELDS
    CHUNKS: constexpr = COLUMNS // (_LANES * FIELDS)
    GROUPS: constexpr = COLUMNS // GROUP if COLUMNS > GROUP else 1
    word = first // FIELDS + tl.arange(0, COLUMNS // FIELDS)
    at = rows[:, None] * (pieces * _LANES) + word[None, :]
    within = (word < pieces * _LANES)[None, :]
    shape: constexpr = [rows.shape[0], CHUNKS, 1, _LANES]
    field = tl.arange(0, FIELDS)[None, None, :, None]
    codes = (tl.reshape(tl.load(words + at, within, 0), shape) >> (WIDTH * field)) & ((1 << WIDTH) - 1)
    if BITS == 6:
        upper = tl.reshape(tl.load(high + at, within, 0).to(tl.int32), shape)
        codes = codes | (((upper >> (2 * field)) & 3) << 4)
    codes = tl.reshape(codes, [rows.shape[0], GROUPS, COLUMNS // GROUPS])
    numbers = tl.load(table + codes) if table is not None else (codes - ZERO).to(tl.float32)
    group = first // GROUP + tl.arange(0, GROUPS)
    at = ((rows // _LANES)[:, None] * (K // GROUP) + group[None, :]) * _LANES + (rows % _LANES)[:, None]
    within = (group < K // GROUP)[None, :]
    numbers *= tl.load(scale + at, within, 0.0).to(tl.float32)[:, :, None]
    if minimum is not None:
        numbers += tl.load(minimum + at, within, 0.0).to(tl.float32)[:, :, None]
    return tl.reshape(numbers, [rows.shape[0], COLUMNS])


def dequantize(matrix: PackedMatrix, first: int, out: Tensor) -> None:
    """Dequantize matrix rows, from index `first` on; write them to `out` [rows, K]."""
    _launch(matrix, None, first, 1.0, out, _ROWS)


def dequantize_rows(matrix: PackedMatrix, rows: Tensor, factor: float, out: Tensor) -> None:
    """Dequantize the matrix rows `rows`; write them times `factor` to `out` [rows, K]."""
    _launch(matrix, rows, 0, factor, out, 1)


def _launch(matrix: PackedMatrix, rows: Tensor | None, first: int, factor: float, out: Tensor, block: int) -> None:
    count, columns = out.shape
    pieces = columns // (LANES * fields(matrix.bits))
    # The grid has one dimension, because the second and third dimension allow only 65535 programs.
    grid = (-(-columns // _COLUMNS) * -(-count // block),)
    tensors = (matrix.words, matrix.high, matrix.scale, matrix.minimum, matrix.table)
    constants = {"BITS": matrix.bits, "GROUP": matrix.group_size, "ZERO": matrix.zero}
    launch(_dequantize, grid, *tensors, rows, first, factor, out, count, pieces, warps=4, ROWS=block, **constants,
           COLUMNS=_COLUMNS)  # fmt: skip


@triton.jit(do_not_specialize=["first", "count"])
def _dequantize(
    words, high, scale, minimum, table, rows, first, factor, out, count, pieces,
    ROWS: constexpr, COLUMNS: constexpr, BITS: constexpr, GROUP: constexpr, ZERO: constexpr,
):  # fmt: skip
    K = pieces * (16 if BITS == 8 else 32)
    across = tl.cdiv(K, COLUMNS)
    places = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(0) % across * COLUMNS
    columns = at + tl.arange(0, COLUMNS)
    wanted = tl.minimum(places, count - 1)
    matrix_rows = tl.load(rows + wanted).to(tl.int32) if rows is not None else first + wanted
    numbers = weight_tile(
        words, high, scale, minimum, table, matrix_rows, at, pieces, tl.float32, COLUMNS, BITS, GROUP, ZERO
    )
    within = (places < count)[:, None] & (columns < K)[None, :]
    to = out + places.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(to, (numbers * factor).to(out.dtype.element_ty), within)
