"""Kernels that dequantize rows of packed matrices: the rows of given tokens, or consecutive rows for cuBLAS."""
# pyright: reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from helexa.neuron.ops.triton.launch import launch
from helexa.neuron.ops.triton.products.packed import LANES, PackedMatrix, fields
from helexa.neuron.ops.triton.products.weight_tile import weight_tile

_ROWS, _COLUMNS = 16, 256


def dequantize(matrix: PackedMatrix, first: int, out: Tensor) -> None:
    """Dequantize R consecutive rows of a matrix [N, K], starting at row `first`, to `out` [R, K]."""
    _launch(matrix, None, first, 1.0, out, _ROWS)


def dequantize_rows(matrix: PackedMatrix, rows: Tensor, factor: float, out: Tensor) -> None:
    """Dequantize the R rows of a matrix [N, K] with the indexes `rows` [R], times `factor`, to `out` [R, K]."""
    _launch(matrix, rows, 0, factor, out, 1)


def _launch(matrix: PackedMatrix, rows: Tensor | None, first: int, factor: float, out: Tensor, block: int) -> None:
    count, columns = out.shape
    pieces = columns // (LANES * fields(matrix.bits))
    grid = (-(-columns // _COLUMNS) * -(-count // block),)  # one dimension: the others allow only 65535 blocks
    tensors = (matrix.words, matrix.high, matrix.scale, matrix.minimum, matrix.table)
    form = {"BITS": matrix.bits, "GROUP": matrix.group_size, "ZERO": matrix.zero}
    launch(_dequantize, grid, *tensors, rows, first, factor, out, count, pieces, warps=4, ROWS=block, **form,
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
