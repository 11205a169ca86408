"""Attention over the paged KV cache: selection of kernels and tile shapes.

A span is the rows (tokens) of one sequence in a batch. A short span has one row, or a few rows with draft tokens. All
other spans are long.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from helexa.neuron.ops.batch import AttentionKind, Batch
from helexa.neuron.ops.kernel_header import MAX_DRAFTS, PAGE_SIZE
from helexa.neuron.ops.triton.attention_kernels import LEAST_SEGMENT, LOG2_E, attend_long, attend_short, merge_segments
from helexa.neuron.ops.triton.kv_cache import Paged
from helexa.neuron.ops.triton.launch_and_graphs import GpuProperties, launch

_WIDEST, _WIDEST_WITHOUT_TENSOR_CORES = 512, 256  # largest head dimensions (see `widest`)

_FEW = 1 + MAX_DRAFTS  # maximum rows of a short span: an accepted token and draft tokens
_MOST_DRAFTED = 4 * MAX_DRAFTS  # maximum draft rows in the kernel for short spans; limits the partial results
_NO_WINDOW = 1 << 30
_SHARES = 256  # maximum segments of a row, summed over all KV heads
_WAVES = 4  # programs per multiprocessor, so that no multiprocessor idles for long at the end


@dataclass(frozen=True)
class Tile:
    """Tile shape of an attention kernel."""

    rows: int  # number of queries in a tile. A query is one head of one row.
    block: int  # number of positions per loop iteration
    warps: int  # number of warps per program
    stages: int  # number of loop iterations for which memory loads are in flight at the same time


def attend(queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind, gpu: GpuProperties) -> Tensor:
    """Return causal attention over the KV pages, with Triton kernels.

    Queries and result are [rows, heads, head_dim]. The heads of each row of `queries` must be contiguous in memory.
    Apart from the choice of the kernel, the result of a row does not depend on other sequences in the batch.
    """
    rows, heads, dim = queries.shape
    paged = Paged.from_cache(cache)
    group = heads // paged.kv_heads
    out = torch.empty((rows, heads, dim), dtype=queries.dtype, device=queries.device)
    spans, width = batch.spans.pages.shape
    # If the batch has a long span or too many draft rows, all spans of several rows use the kernel for long spans.
    few = _few(batch, rows)
    # GPUs compute exp2 faster than exp.
    window, factor = kind.window or _NO_WINDOW, kind.scale * LOG2_E.value
    cap = None if kind.cap is None else kind.cap * LOG2_E.value
    span_tables = (batch.spans.starts, batch.spans.prefixes)
    strides = (queries.stride(0), paged.head_stride, paged.page_stride, paged.values_offset)
    shape = {"PAGE": PAGE_SIZE, "DIM": dim, "GROUP": group}

    if batch.singles or few > 1:
        most = min(max(batch.most_rows, 1), few)
        short = short_tile(group, dim, paged.numbers.element_size(), gpu)
        limit = segments(paged.kv_heads)
        segment_count = min(limit, -(-width * PAGE_SIZE // LEAST_SEGMENT.value))
        split = rows if few > 1 else batch.singles
        sums = torch.empty((split, heads, segment_count, 2), dtype=torch.float32, device=queries.device)
        weighted = torch.empty((split, heads, segment_count, dim), dtype=torch.float32, device=queries.device)
        tiles = -(-most // (short.rows // group))
        shares = min(segment_count, max(1, -(-_WAVES * gpu.processors // (spans * paged.kv_heads))))
        launch(
            attend_short, (spans * tiles, paged.kv_heads, shares),
            queries, sums, weighted,
            paged.numbers, paged.scales, batch.spans.pages, *span_tables, width, few, most, segment_count,
            *strides, window, factor, cap,
            **shape, TILE=short.rows, BLOCK=short.block, SEGMENTS=limit, warps=short.warps, stages=short.stages,
        )  # fmt: skip
        launch(
            merge_segments, (spans * most, heads),
            sums, weighted, out, kind.sinks, *span_tables, few, most, segment_count, out.stride(0), window,
            DIM=dim, SEGMENTS=limit, warps=1,
        )  # fmt: skip
    if has_long(batch, rows):
        long = long_tile(group, dim, paged.numbers.element_size(), gpu)
        tiles = -(-batch.most_rows // (long.rows // group))
        launch(
            attend_long, (tiles, paged.kv_heads, spans),
            queries, out, paged.numbers, paged.scales, kind.sinks, batch.spans.pages, *span_tables, width, few,
            strides[0], out.stride(0), *strides[1:], window, factor, cap,
            **shape, TILE=long.rows, BLOCK=long.block, WINDOWED=kind.window is not None,
            warps=long.warps, stages=long.stages,
        )  # fmt: skip
    return out


def widest(gpu: GpuProperties) -> int:
    """Return the largest head dimension for which the kernels do not spill registers."""
    return _WIDEST if gpu.tensor_cores else _WIDEST_WITHOUT_TENSOR_CORES


def has_long(batch: Batch, rows: int) -> bool:
    """Return whether `attend` uses the kernel for long spans, for `rows` query rows."""
    return batch.most_rows > _few(batch, rows)


def _few(batch: Batch, rows: int) -> int:
    return _FEW if batch.most_rows <= _FEW and rows <= len(batch.spans.pages) + _MOST_DRAFTED else 1


def partials_bytes(sequences: int, heads: int, kv_heads: int, dim: int) -> int:
    """Return the maximum bytes of partial results of short spans (decode)."""
    return (sequences + _MOST_DRAFTED) * heads * segments(kv_heads) * (dim + 2) * 4


def segments(kv_heads: int) -> int:
    """Return the maximum number of segments into which decode divides a sequence."""
    # More KV heads need fewer segments to occupy the GPU, because each head has its own programs.
    return triton.next_power_of_2(max(_SHARES // kv_heads, 8))


def short_tile(group: int, dim: int, itemsize: int, gpu: GpuProperties) -> Tile:
    """Return the tile shape of the attention kernel for short spans (decode).

    Args:
        group: number of query heads per KV head.
        itemsize: bytes of a number in the KV cache.
    """
    # Tensor cores multiply at least 16 rows.
    rows, width = max(16, triton.next_power_of_2(group)), triton.next_power_of_2(dim)
    warps = 4 if width <= 256 else 8
    # Without tensor cores, and with float32, sums are in registers, and loads are not prefetched.
    if not gpu.tensor_cores or itemsize == 4:
        return Tile(rows, 32 if width <= 128 else 16, 4, 1)
    fixed_bytes = rows * width * (2 + 4)  # queries, and sums before they are stored
    # If the shared memory is large enough, two programs run on a multiprocessor at the same time, each with two or
    # three blocks prefetched.
    for free_bytes in (gpu.shared_memory // 2 - fixed_bytes, gpu.shared_memory - fixed_bytes):
        for block in (PAGE_SIZE, 32) if width <= 128 else (32,):
            ahead = free_bytes // (2 * block * width * itemsize)
            if ahead >= 2:
                return Tile(rows, block, warps, min(ahead, 3) + 1)
    return Tile(rows, 16, warps, 2)


def long_tile(group: int, dim: int, itemsize: int, gpu: GpuProperties) -> Tile:
    """Return the tile shape of the attention kernel for long spans (see `short_tile`)."""
    # The tile has as many queries as the registers permit, because all queries of a tile share the loads of K and V.
    width, warps = triton.next_power_of_2(dim), 8
    large = gpu.shared_memory > 200 * 1024
    fit = (128 if large else 64) * 128 // width
    rows, block = 128 if large or width <= 128 else 64, min(fit, 128 if large else 64)
    if large and width > 256:
        rows = 32  # Hopper's products of 64 rows and more would spill registers
    elif itemsize == 1:  # the conversion of 8-bit numbers needs registers, too
        rows, block = (rows, block // 2) if large else (64, block)
    rows = max(rows, triton.next_power_of_2(group))
    fixed_bytes = rows * width * 2 + (
        rows * block * 2 if rows < 16 * warps else 0
    )  # memory for queries, and for weights that warps exchange
    ahead = (gpu.shared_memory - fixed_bytes) // (2 * block * width * itemsize)
    return Tile(rows, block, warps, max(2, min(3, ahead if large else ahead + 1)))
