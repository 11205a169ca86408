"""Functions that the attention kernels share: tiles of queries, and attention to one block of positions.

Scores are multiplied by log2(e), because GPUs compute `exp2` faster than `exp`.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_block(
    running,
    queries,
    places,
    cache,
    scales,
    page,
    start,
    end,
    window,
    factor,
    page_stride,
    values_offset,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Update the running softmax of M queries with the BLOCK positions from `start` on, as in flash attention.

    Args:
        running: largest score [M], sum of weights [M] and sum of weighted values [M, W] of the earlier positions, all
            float32. W is the head dimension DIM rounded up to a power of two.
        queries: [M, W].
        places: [M], the position of each query.
        cache: address of the head's first key in page 0. The value of a position is `values_offset` numbers after its
            key.
        scales: scales of an 8-bit cache, as float32; None for other caches.
        page: number of the KV page that contains the positions (see `page_of`).
        end: number of positions of the sequence; later positions are not read.
        window: number of positions that a query attends to, including its own position.
        factor: factor applied to scores.
        MASKED: whether the causal mask or the window hides some of the BLOCK positions from some queries.

    Returns:
        The three parts of `running`, updated with the positions of the block.
    """
    largest, total, summed = running
    columns = tl.arange(0, queries.shape[1])
    offsets = tl.arange(0, BLOCK)
    positions = start + offsets
    inside = positions % PAGE
    rows = page * page_stride + inside * DIM
    numbers = cache + rows[:, None] + columns[None, :]
    within = columns[None, :] < DIM
    if MASKED:
        within = within & (positions < end)[:, None]
    keys = tl.load(numbers, within, 0)
    scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee") * factor
    if scales is not None:
        # Layout of an 8-bit page: keys, values, scales of keys, scales of values.
        key_scales = scales + page * (page_stride // 4) + PAGE * DIM // 2 + inside
        scores *= tl.load(key_scales, positions < end, 0.0)[None, :]
    if MASKED:
        visible = (positions[None, :] <= places[:, None]) & (positions[None, :] > places[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    rising = tl.maximum(largest, tl.max(scores, 1))
    # Until a query has seen a position, its largest score is -inf, and -inf minus -inf would be NaN.
    base = tl.where(rising == float("-inf"), 0.0, rising) if MASKED else rising
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(largest - base)
    total = total * shrink + tl.sum(weights, 1)
    if scales is not None:
        weights *= tl.load(key_scales + PAGE, positions < end, 0.0)[None, :]
    values = tl.load(numbers + values_offset, within, 0).to(queries.dtype)
    summed = tl.dot(weights.to(queries.dtype), values, summed * shrink[:, None], input_precision="ieee")
    return rising, total, summed


@triton.jit
def page_of(pages, start, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of the KV page that contains the BLOCK positions from `start` on.

    If a block is larger than a page, the function returns one page number per position. Positions from `end` on get an
    arbitrary page. Kernels load the page number one loop iteration ahead, because Triton prefetches only half as many
    blocks if a load depends on another load of the same iteration.

    Args:
        pages: address of the sequence's page numbers.
    """
    positions = start if BLOCK <= PAGE else start + tl.arange(0, BLOCK)
    return tl.load(pages + positions // PAGE, positions < end, 0).to(tl.int64)


@triton.jit
def tile_of(kv_head, first, count, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Return the token and the query head of each of the TILE rows of a tile, and a mask of the rows in use.

    A tile contains first all query heads of the KV head for the first token, then for the next token, and so on. The
    last rows may be unused.

    Args:
        kv_head: index of the KV head.
        first: index in the span of the tile's first token.
        count: number of tokens in the span.
        GROUP: number of query heads per KV head.
    """
    rows = tl.arange(0, TILE)
    tokens = first + rows // GROUP
    return tokens, kv_head * GROUP + rows % GROUP, (rows < TILE // GROUP * GROUP) & (tokens < count)
