"""Matrix products of several rows on tensor cores, dequantized in registers.

Programs that read the same rows of the matrix are adjacent, so that they share loads in the GPU's cache. If the matrix
has too few tiles to use the full memory bandwidth, the K columns are split among several programs, and a second kernel
adds their results in a fixed order.
"""
# pyright: reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from helexa.neuron.ops.triton.dequantize import weight_tile
from helexa.neuron.ops.triton.launch_and_graphs import GpuProperties, launch
from helexa.neuron.ops.triton.packed_weights import LANES, PackedMatrix, fields

_PER_PROCESSOR = 4  # programs per multiprocessor (SM) that read a matrix, to keep enough loads in flight
_LEAST_SPLIT = 512  # minimum columns per split
_SUM_BLOCK = 1024


@dataclass(frozen=True)
class Tiles:
    """Tile shape of a matrix product."""

    rows: int  # number of input rows in a tile
    outputs: int  # number of matrix rows in a tile
    columns: int  # number of matrix columns per loop iteration
    splits: int  # number of programs among which the columns of a tile are split
    warps: int  # number of warps per program
    stages: int  # number of loop iterations for which memory loads are in flight at the same time


@dataclass(frozen=True)
class Blocks:
    """The output rows of a mixture's product, in blocks with one expert each.

    Each output row belongs to a pair: an input row and one of its selected experts. `arrange` creates the blocks.
    """

    order: Tensor  # int32 [T], indexes of the T output rows, sorted by expert
    # int32 [3, B]. For each block: its expert, the index in `order` of its first row, and the index after its last row.
    # Unused blocks have no rows.
    bounds: Tensor


def on_tensor_cores(dtype: torch.dtype, gpu: GpuProperties) -> bool:
    """Return whether Triton multiplies `dtype` on the tensor cores of `gpu`."""
    return dtype.itemsize == 2 and gpu.tensor_cores


def tiles(rows: int, matrix: PackedMatrix | Tensor, dtype: torch.dtype, gpu: GpuProperties) -> Tiles:
    """Return the tile shape for a product of `rows` input rows with a matrix."""
    # Up to 16 rows, reading the matrix takes most of the time, so many small programs are best. From 65 rows on, reuse
    # of loaded tiles matters. Without tensor cores, tiles are in registers and must be small.
    if not on_tensor_cores(dtype, gpu):
        return Tiles(16, 32, 32, 1, 4, 1)
    outputs, columns = matrix.shape
    if rows <= 16:
        return Tiles(16, 64, 128, _splits(outputs, columns, _PER_PROCESSOR * gpu.processors), 4, 3)
    if rows <= 64:
        return Tiles(64, 64, 128, _splits(outputs, columns, gpu.processors), 4, 2)
    looked_up = isinstance(matrix, PackedMatrix) and matrix.table is not None  # table addresses use registers
    return Tiles(128, 64 if looked_up else 128, 64, 1, 8, 3)


def _splits(outputs: int, columns: int, programs: int) -> int:
    return max(1, min(programs // -(-outputs // 64), columns // _LEAST_SPLIT))


def multiply_tiles(
    x: Tensor,
    matrix: PackedMatrix | Tensor,
    bias: Tensor | None,
    out: Tensor,
    cut: Tiles,
    blocks: Blocks | None = None,
) -> None:
    """Compute `out = x @ matrix.T + bias` (see `multiply_rows`).

    Args:
        cut: tile shape. With `blocks`, `cut.splits` must be 1, and `cut.rows` is the maximum number of rows of a block.
        blocks: blocks of rows of `out`, each multiplied by the matrix of one expert in `matrix`; None if `matrix` is
            one matrix for all rows.
    """
    rows, outputs = out.shape
    columns = x.shape[1]
    if isinstance(matrix, Tensor):
        tensors = (matrix, None, None, None, None)
        constants = {"BITS": 16, "GROUP": 1, "ZERO": 0}
        piece_columns = 8
    else:
        tensors = (matrix.words, matrix.high, matrix.scale, matrix.minimum, matrix.table)
        constants = {"BITS": matrix.bits, "GROUP": matrix.group_size, "ZERO": matrix.zero}
        piece_columns = LANES * fields(matrix.bits)
    to, added = out, bias
    if cut.splits > 1:
        to, added = torch.empty((cut.splits, rows, outputs), dtype=torch.float32, device=x.device), None
    order, bounds = (None, None) if blocks is None else (blocks.order, blocks.bounds)
    blocks_of_rows = -(-rows // cut.rows) if blocks is None else blocks.bounds.shape[1]
    share = rows // max(x.shape[0], 1)
    step = -(-columns // (cut.splits * cut.columns)) * cut.columns  # columns per split
    arguments = (
        x,
        *tensors,
        added,
        order,
        bounds,
        to,
        to.stride(-2),
        rows,
        outputs,
        columns // piece_columns,
        step,
        share,
    )
    launch(
        _multiply,
        (blocks_of_rows, -(-outputs // cut.outputs), cut.splits),
        *arguments,
        warps=cut.warps,
        stages=cut.stages,
        **constants,
        ROWS=cut.rows,
        OUTPUTS=cut.outputs,
        COLUMNS=cut.columns,
        STAGES=cut.stages,
    )
    if cut.splits > 1:
        grid = (rows, -(-outputs // _SUM_BLOCK))
        arguments = (to, bias, out, out.stride(0), rows, outputs)
        launch(_add_up, grid, *arguments, warps=4, SPLITS=cut.splits, BLOCK=_SUM_BLOCK)


@triton.jit(do_not_specialize=["M"])
def _multiply(
    x, words, high, scale, minimum, table, bias, order, bounds, out, out_stride, M, N, pieces, step, share,
    BITS: constexpr, GROUP: constexpr, ZERO: constexpr,
    ROWS: constexpr, OUTPUTS: constexpr, COLUMNS: constexpr, STAGES: constexpr,
):  # fmt: skip
    K = pieces * (8 if BITS == 16 else 16 if BITS == 8 else 32)
    block = tl.program_id(0)
    split = tl.program_id(2)
    if order is not None:
        blocks = tl.num_programs(0)
        first = tl.load(bounds + blocks + block)
        end = tl.load(bounds + 2 * blocks + block)
        if first >= end:
            return
        expert = tl.load(bounds + block).to(tl.int64)
        words += expert * N * (pieces * (8 if BITS == 16 else 4))
        if BITS == 6:
            high += expert * N * (pieces * 4)
        if BITS != 16:
            scale += expert * N * (K // GROUP)
            if minimum is not None:
                minimum += expert * N * (K // GROUP)
        if bias is not None:
            bias += expert * N
        place = first + tl.arange(0, ROWS)
        exists = place < end
        rows = tl.load(order + tl.minimum(place, end - 1))
    else:
        rows = block * ROWS + tl.arange(0, ROWS)
        exists = rows < M
        rows = tl.minimum(rows, M - 1)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    matrix_rows = tl.minimum(outputs, N - 1)
    x_rows = x + (rows // share).to(tl.int64)[:, None] * K
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in tl.range(split * step, tl.minimum(K, (split + 1) * step), COLUMNS, num_stages=STAGES):
        columns = at + tl.arange(0, COLUMNS)
        numbers = tl.load(x_rows + columns[None, :], (columns < K)[None, :], 0.0)
        weights = weight_tile(
            words, high, scale, minimum, table, matrix_rows, at, pieces, x.dtype.element_ty, COLUMNS, BITS, GROUP, ZERO
        )
        total = tl.dot(numbers, tl.trans(weights), total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + matrix_rows)[None, :]
    to = out + (split.to(tl.int64) * M + rows)[:, None] * out_stride + outputs[None, :]
    tl.store(to, total.to(out.dtype.element_ty), exists[:, None] & (outputs < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def _add_up(partials, bias, out, out_stride, M, N, SPLITS: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = outputs < N
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials + (split * M + row) * N + outputs, within, 0.0)
    if bias is not None:
        total += tl.load(bias + outputs, within, 0.0)
    tl.store(out + row * out_stride + outputs, total.to(out.dtype.element_ty), within)
