"""Layout of a layer's KV cache in the Triton kernels, and its writing kernel.

A cache of 16 or 32 bits has the layout of `ReferenceOps`. An 8-bit cache is uint8 [pages, kv_heads, bytes]. For each
page and head, it contains keys [PAGE_SIZE, D], values [PAGE_SIZE, D], one float32 scale per key, and one float32 scale
per value. The scale of a key or value maps its largest absolute number to 127.

One kernel does the work before attention: norms and RoPE of queries and keys, and the write to the cache.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.linear_and_norm_operators import HeadNorms
from helexa.neuron.ops.triton.launch_and_graphs import launch

_SCALES = 2 * PAGE_SIZE * 4

_HEADS = 4  # heads per program; with heads of 128 16-bit numbers, each thread of a warp loads 16 bytes twice


def page_bytes(kv_heads: int, dim: int) -> int:
    """Return the bytes of a KV page in one layer of the Triton kernels' 8-bit cache."""
    return kv_heads * (2 * PAGE_SIZE * dim + _SCALES)


def new_cache(kv_heads: int, pages: int, dim: int, device: torch.device) -> Tensor:
    """Return a zeroed 8-bit KV cache with `pages` pages for one layer."""
    return torch.zeros((pages, kv_heads, page_bytes(1, dim)), dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Paged:
    """A KV cache with the strides that kernels need to compute addresses.

    The key of a position is at page * page_stride + head * head_stride + (offset in the page) * D, for head dimension
    D.
    """

    numbers: Tensor  # the cache, viewed with the dtype of its keys and values
    scales: Tensor | None  # an 8-bit cache viewed as float32, to read its scales; None for other caches
    kv_heads: int
    head_stride: int  # distance between two heads, in numbers
    page_stride: int  # distance between two pages, in numbers
    values_offset: int  # distance from the key to the value of a position, in numbers; 0 if the key is the value

    @classmethod
    def from_cache(cls, cache: Tensor) -> "Paged":
        """Return `cache` with the strides that follow from its shape.

        A cache with three dimensions is an 8-bit cache. Other caches have the layout of `ReferenceOps`.
        """
        if cache.dim() == 3:
            _, kv_heads, size = cache.shape
            strides = (size, kv_heads * size, (size - _SCALES) // 2)
            return cls(cache.view(torch.int8), cache.view(torch.float32), kv_heads, *strides)
        kinds, kv_heads, _, dim = cache.shape
        values_offset = cache.stride(0) if kinds > 1 else 0
        return cls(cache, None, kv_heads, cache.stride(1), PAGE_SIZE * dim, values_offset)


def rotate_store(
    qkv: Tensor, heads: int, rope: tuple[Tensor, Tensor], cache: Tensor, slots: Tensor, norms: HeadNorms | None
) -> Tensor:
    """Apply norms and RoPE, write keys and values to the cache, return the queries.

    The keys and values of rows with the slot -1 are not written.
    """
    rows, width, dim = qkv.shape
    cos, sin = rope
    paged = Paged.from_cache(cache)
    kv_heads = paged.kv_heads if width > heads else 0
    shared = heads + 2 * kv_heads - width  # key heads that are also value heads: all or none
    kinds = 2 if paged.values_offset else 1
    queries = torch.empty((rows, heads, dim), dtype=qkv.dtype, device=qkv.device)
    weights = (None, None, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
    norm_last = norms is not None and norms.last
    strides = (qkv.stride(0), paged.head_stride, paged.page_stride, paged.values_offset)
    norm_values = norms is not None and norms.values
    constants = {
        "QUERIES": heads,
        "KV_HEADS": kv_heads,
        "KINDS": kinds,
        "SHARED": shared,
        "DIM": dim,
        "HALF": cos.shape[1],
        "NORM_VALUES": norm_values,
        "NORM_LAST": norm_last,
    }
    launch(
        _rotate_store, (rows, -(-(heads + kinds * kv_heads) // _HEADS)),
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
    # Large strides are 64-bit integers. Triton would otherwise choose the integer type by value, and recompile the
    # kernel for larger caches.
    head_stride: tl.int64,
    page_stride,
    values_offset: tl.int64,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KINDS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    NORM_LAST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    exists = heads < QUERIES + KINDS * KV_HEADS
    source_heads = tl.where(heads >= QUERIES + KV_HEADS, heads - SHARED, heads)
    source = qkv + row * qkv_stride + source_heads[:, None] * DIM
    columns = tl.arange(0, triton.next_power_of_2(HALF))
    cells = exists[:, None] & (columns < HALF)[None, :]
    first = tl.load(source + columns[None, :], cells, 0.0).to(tl.float32)
    second = tl.load(source + HALF + columns[None, :], cells, 0.0).to(tl.float32)
    unrotated_columns = 2 * HALF + tl.arange(
        0, triton.next_power_of_2(max(DIM - 2 * HALF, 1))
    )  # numbers that are not rotated
    unrotated_cells = exists[:, None] & (unrotated_columns < DIM)[None, :]
    unrotated = tl.load(source + unrotated_columns[None, :], unrotated_cells, 0.0).to(tl.float32)

    dtype: tl.constexpr = qkv.dtype.element_ty
    is_query, is_rotated = (heads < QUERIES)[:, None], (heads < QUERIES + KV_HEADS)[:, None]
    if query_norm is not None and not NORM_LAST:
        first, second, unrotated = _normed(
            first, second, unrotated, query_norm, key_norm, eps, columns, unrotated_columns, is_query, is_rotated,
            HALF, DIM, NORM_VALUES, dtype,
        )  # fmt: skip
    cosines = tl.load(cos + row * HALF + columns, columns < HALF, 0.0)[None, :]
    sines = tl.load(sin + row * HALF + columns, columns < HALF, 0.0)[None, :]
    rotated = first * cosines - second * sines
    second = tl.where(is_rotated, second * cosines + first * sines, second)
    first = tl.where(is_rotated, rotated, first)
    if query_norm is not None and NORM_LAST:
        first, second, unrotated = _normed(
            first, second, unrotated, query_norm, key_norm, eps, columns, unrotated_columns, is_query, is_rotated,
            HALF, DIM, NORM_VALUES, dtype,
        )  # fmt: skip

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
def _normed(
    first,
    second,
    unrotated,
    query_norm,
    key_norm,
    eps,
    columns,
    unrotated_columns,
    is_query,
    is_rotated,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return query, key and value heads after their norms, in three parts.

    Value heads are normalized only if NORM_VALUES.

    Args:
        first, second: the first and second half of the columns that RoPE rotates, of several heads.
        unrotated: the other columns.
    """
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(unrotated * unrotated, 1)
    scale = tl.rsqrt(squares / DIM + eps)[:, None]
    first = _weighted(first, scale, query_norm, key_norm, columns, HALF, is_query, is_rotated, NORM_VALUES, DTYPE)
    second = _weighted(
        second, scale, query_norm + HALF, key_norm + HALF, columns, HALF, is_query, is_rotated, NORM_VALUES, DTYPE
    )
    unrotated = _weighted(
        unrotated, scale, query_norm, key_norm, unrotated_columns, DIM, is_query, is_rotated, NORM_VALUES, DTYPE
    )
    return first, second, unrotated


@triton.jit
def _weighted(
    x, scale, query_norm, key_norm, columns, end, is_query, is_rotated, NORM_VALUES: tl.constexpr, DTYPE: tl.constexpr
):
    """Return x times `scale` (1 / rms of each head), and times the norm's weight.

    Value heads have no weight, and stay unchanged if `NORM_VALUES` is False.
    """
    query_weight = tl.load(query_norm + columns, columns < end, 0.0)[None, :]
    key_weight = tl.load(key_norm + columns, columns < end, 0.0)[None, :]
    weight = tl.where(is_query, query_weight, key_weight)
    if NORM_VALUES:
        weight = tl.where(is_rotated, weight, 1.0)
    # Rounded to DTYPE, as if a separate norm kernel had written the numbers to memory.
    normed = (x * scale * weight).to(DTYPE).to(tl.float32)
    return normed if NORM_VALUES else tl.where(is_rotated, normed, x)
