"""One kernel for the work before attention: norms and RoPE of queries and keys, and the write to the KV cache."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from helexa.neuron.ops.constants import PAGE_SIZE
from helexa.neuron.ops.norm import HeadNorms
from helexa.neuron.ops.triton.attention.kv_cache import Paged
from helexa.neuron.ops.triton.launch import launch

_HEADS = 4  # heads per program: 128 numbers each make two 16-byte loads per thread of a warp


def rotate_store(
    qkv: Tensor, heads: int, rope: tuple[Tensor, Tensor], cache: Tensor, slots: Tensor, norms: HeadNorms | None
) -> Tensor:
    """Apply norms and RoPE to queries and keys, write keys and values to the KV cache, and return the queries.

    Rows with slot -1 are padding rows, which are not written to the cache. `Ops.rotate_store` describes the arguments.
    """
    rows, all_heads, dim = qkv.shape
    cos, sin = rope
    paged = Paged.from_cache(cache)
    queries = torch.empty((rows, heads, dim), dtype=qkv.dtype, device=qkv.device)
    weights = (None, None, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
    strides = (qkv.stride(0), paged.head_stride, paged.page_stride, paged.values_offset)
    constants = {"QUERIES": heads, "KV_HEADS": paged.kv_heads, "DIM": dim, "HALF": cos.shape[1]}
    launch(
        _rotate_store, (rows, -(-all_heads // _HEADS)),
        qkv, cos, sin, queries, paged.numbers, paged.scales, slots, *weights, *strides,
        **constants, PAGE=PAGE_SIZE, HEADS=_HEADS, warps=triton.next_power_of_2(max(1, dim // 128)),
    )  # fmt: skip
    return queries


@triton.jit(do_not_specialize=("slots",))
def _rotate_store(
    qkv,
    cos,
    sin,
    queries,
    cache,
    scales,
    slots,
    query_norm,
    key_norm,
    eps,
    qkv_stride,
    head_stride: tl.int64,
    page_stride,
    values_offset: tl.int64,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    exists = heads < QUERIES + 2 * KV_HEADS
    source = qkv + row * qkv_stride + heads[:, None] * DIM
    columns = tl.arange(0, triton.next_power_of_2(HALF))
    cells = exists[:, None] & (columns < HALF)[None, :]
    first = tl.load(source + columns[None, :], cells, 0.0).to(tl.float32)
    second = tl.load(source + HALF + columns[None, :], cells, 0.0).to(tl.float32)
    unrotated_columns = 2 * HALF + tl.arange(
        0, triton.next_power_of_2(max(DIM - 2 * HALF, 1))
    )  # numbers that are not rotated
    unrotated_cells = exists[:, None] & (unrotated_columns < DIM)[None, :]
    unrotated = tl.load(source + unrotated_columns[None, :], unrotated_cells, 0.0).to(tl.float32)

    is_query, is_rotated = (heads < QUERIES)[:, None], (heads < QUERIES + KV_HEADS)[:, None]
    if query_norm is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(unrotated * unrotated, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        dtype: tl.constexpr = qkv.dtype.element_ty
        first = _normed(first, scale, query_norm, key_norm, columns, HALF, is_query, is_rotated, dtype)
        second = _normed(second, scale, query_norm + HALF, key_norm + HALF, columns, HALF, is_query, is_rotated, dtype)
        unrotated = _normed(unrotated, scale, query_norm, key_norm, unrotated_columns, DIM, is_query, is_rotated, dtype)
    cosines = tl.load(cos + row * HALF + columns, columns < HALF, 0.0)[None, :]
    sines = tl.load(sin + row * HALF + columns, columns < HALF, 0.0)[None, :]
    rotated = first * cosines - second * sines
    second = tl.where(is_rotated, second * cosines + first * sines, second)
    first = tl.where(is_rotated, rotated, first)

    query_at = queries + (row * QUERIES + heads)[:, None] * DIM
    is_query = cells & is_query
    tl.store(query_at + columns[None, :], first.to(queries.dtype.element_ty), is_query)
    tl.store(query_at + HALF + columns[None, :], second.to(queries.dtype.element_ty), is_query)
    tl.store(
        query_at + unrotated_columns[None, :],
        unrotated.to(queries.dtype.element_ty),
        unrotated_cells & (heads < QUERIES)[:, None],
    )

    slot = tl.load(slots + row).to(tl.int64)
    stored = exists & (heads >= tl.where(slot >= 0, QUERIES, QUERIES + 2 * KV_HEADS))
    is_value = (heads >= QUERIES + KV_HEADS).to(tl.int64)
    kv_head = heads - QUERIES - is_value * KV_HEADS
    at = slot // PAGE * page_stride + kv_head * head_stride
    inside = slot % PAGE
    if scales is not None:
        peak = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        peak = tl.maximum(peak, tl.max(tl.abs(unrotated), 1))
        inverse = tl.where(peak > 1e-30, 127.0 / peak, 0.0)[:, None]
        # A non-finite number makes the scale NaN, so the row stays non-finite as in 16-bit caches.
        total = tl.sum(first, 1) + tl.sum(second, 1) + tl.sum(unrotated, 1)
        step = tl.where(total == total, peak / 127.0, total)
        tl.store(scales + at // 4 + PAGE * DIM // 2 + inside + is_value * PAGE, step, stored)
        first = tl.floor(first * inverse + 0.5)
        second = tl.floor(second * inverse + 0.5)
        unrotated = tl.floor(unrotated * inverse + 0.5)
    cache_at = cache + (at + inside * DIM + is_value * values_offset)[:, None]
    storing = cells & stored[:, None]
    tl.store(cache_at + columns[None, :], first.to(cache.dtype.element_ty), storing)
    tl.store(cache_at + HALF + columns[None, :], second.to(cache.dtype.element_ty), storing)
    tl.store(
        cache_at + unrotated_columns[None, :], unrotated.to(cache.dtype.element_ty), unrotated_cells & stored[:, None]
    )


@triton.jit
def _normed(x, scale, query_norm, key_norm, columns, end, is_query, is_rotated, DTYPE: tl.constexpr):
    """Return the normalized numbers of query and key heads, and the unchanged numbers of value heads.

    Normalized numbers are rounded to DTYPE, as if a separate norm kernel had written them to memory.

    Args:
        x: some columns of several heads.
        scale: 1 / rms of each head.
        is_query: mask of the query heads.
        is_rotated: mask of the query and key heads.
    """
    query_weight = tl.load(query_norm + columns, columns < end, 0.0)[None, :]
    key_weight = tl.load(key_norm + columns, columns < end, 0.0)[None, :]
    normed = (x * scale * tl.where(is_query, query_weight, key_weight)).to(DTYPE).to(tl.float32)
    return tl.where(is_rotated, normed, x)
