"""Attention without a mask within frames, one program per tile of queries.

A frame consists of consecutive rows, such as the patches of an image, or of a window in an image.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false

from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from helexa.neuron.ops.triton.attention import Tile, long_tile
from helexa.neuron.ops.triton.attention_kernels import LOG2_E
from helexa.neuron.ops.triton.launch_and_graphs import GpuProperties, launch

WIDEST = 256  # Largest head dimension that the kernels support

_HEADS = 4  # heads that a program rotates
_TABLES = 4  # number of cached tables of tiles; a vision tower uses one or two for an image


def attend_frames(
    qkv: Tensor, rope: tuple[Tensor, Tensor] | None, lengths: tuple[int, ...], scale: float, gpu: GpuProperties
) -> Tensor:
    """Return each row's attention to all rows of its frame, with Triton kernels."""
    rows, all_heads, dim = qkv.shape
    qkv, heads = qkv.contiguous(), all_heads // 3
    if rope is not None:
        half = rope[0].shape[1]
        grid, constants = (rows, -(-2 * heads // _HEADS)), {"DIM": dim, "HALF": half, "HEADS": _HEADS}
        launch(_rotate, grid, qkv, *rope, 2 * heads, qkv.stride(0), warps=1, **constants)
    out = torch.empty((rows, heads, dim), dtype=qkv.dtype, device=qkv.device)
    shape = _tile(dim, qkv.element_size(), gpu)
    tiles = _tiles(lengths, shape.rows, qkv.device)
    launch(
        _attend, (tiles.shape[0], heads),
        qkv, out, tiles, heads * dim, qkv.stride(0), out.stride(0), scale * LOG2_E.value,
        DIM=dim, TILE=shape.rows, BLOCK=shape.block, warps=shape.warps, stages=shape.stages,
    )  # fmt: skip
    return out


def _tile(dim: int, itemsize: int, gpu: GpuProperties) -> Tile:
    """Return the tile shape of `long_tile`; halve its block if masks need registers."""
    shape = long_tile(1, dim, itemsize, gpu)
    masked = dim & (dim - 1) and gpu.shared_memory < 200 * 1024
    return replace(shape, block=max(shape.block // 2, 16)) if masked else shape


@lru_cache(_TABLES)
def _tiles(lengths: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """Return, per tile: first row in its frame, the frame's first row, frame length."""
    table: list[tuple[int, int, int]] = []
    start = 0
    for length in lengths:
        table += [(first, start, length) for first in range(0, length, rows)]
        start += length
    return torch.tensor(table, dtype=torch.int32).to(device)


@triton.jit
def _rotate(qkv, cos, sin, count, stride, DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, triton.next_power_of_2(HALF))
    within = columns < HALF
    cosines = tl.load(cos + row * HALF + columns, within, 0.0)[None, :]
    sines = tl.load(sin + row * HALF + columns, within, 0.0)[None, :]
    cells = (heads < count)[:, None] & within[None, :]
    at = qkv + row * stride + heads[:, None] * DIM + columns[None, :]
    first = tl.load(at, cells, 0.0).to(tl.float32)
    second = tl.load(at + HALF, cells, 0.0).to(tl.float32)
    dtype: tl.constexpr = qkv.dtype.element_ty
    tl.store(at, (first * cosines - second * sines).to(dtype), cells)
    tl.store(at + HALF, (second * cosines + first * sines).to(dtype), cells)


@triton.jit
def _attend(
    qkv, out, tiles, width, stride, out_stride, factor, DIM: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    W: tl.constexpr = triton.next_power_of_2(DIM)
    head = tl.program_id(1)
    table = tiles + tl.program_id(0) * 3
    start, length = tl.load(table + 1).to(tl.int64), tl.load(table + 2)
    qkv += start * stride + head * DIM
    rows = tl.load(table) + tl.arange(0, TILE)
    columns = tl.arange(0, W)
    cells = (rows < length)[:, None] & (columns < DIM)[None, :]
    query = tl.load(qkv + rows[:, None] * stride + columns[None, :], cells, 0.0)
    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    summed = tl.zeros([TILE, W], tl.float32)
    whole = length // BLOCK * BLOCK
    for at in range(0, whole, BLOCK):
        largest, total, summed = _attend_block(
            largest, total, summed, query, qkv, width, stride, at, length, factor, DIM, BLOCK, False
        )
    if whole < length:
        largest, total, summed = _attend_block(
            largest, total, summed, query, qkv, width, stride, whole, length, factor, DIM, BLOCK, True
        )
    place = out + (start * out_stride + head * DIM) + (rows[:, None] * out_stride + columns[None, :])
    tl.store(place, (summed / total[:, None]).to(out.dtype.element_ty), cells)


@triton.jit
def _attend_block(
    largest, total, summed, query, qkv, width, stride, at, length, factor,
    DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Update the running softmax of a tile of queries with BLOCK rows from `at` on.

    Args:
        largest, total, summed: largest score, sum of weights and sum of weighted values of the earlier rows.
        width: distance from a query to its key, and from a key to its value.
    """
    offsets = tl.arange(0, BLOCK)
    columns = tl.arange(0, query.shape[1])
    within = columns[None, :] < DIM
    if MASKED:
        within = within & (offsets < length - at)[:, None]
    keys_at = qkv + (width + at * stride) + (offsets[:, None] * stride + columns[None, :])
    keys = tl.load(keys_at, within, 0.0)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * factor
    if MASKED:
        scores = tl.where((offsets < length - at)[None, :], scores, float("-inf"))
    rising = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - rising[:, None])
    shrink = tl.exp2(largest - rising)
    values = tl.load(keys_at + width, within, 0.0)
    summed = tl.dot(weights.to(query.dtype), values, summed * shrink[:, None], input_precision="ieee")
    return rising, total * shrink + tl.sum(weights, 1), summed
