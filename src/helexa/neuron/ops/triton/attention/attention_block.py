"""Functions shared by the attention kernels: tiles of queries, and attention to one block of positions.

Scores are in units of log2(e), since processors compute `exp2`.
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
    """Let queries attend to the BLOCK positions from `start` on.

    Args:
        running: largest score [M], sum of weights [M] and weighted values [M, W] so far, float32; W is DIM padded to a
            power of two.
        queries: [M, W].
        places: [M], the position of each query.
        cache: address of the head's first key in page 0; values are `values_offset` numbers after the keys.
        scales: scales of an 8-bit cache, as float32; None for other caches.
        page: page of the positions (see `page_of`).
        end: end of the sequence; later positions are not read.
        window: number of positions that a query sees, including its own position.
        factor: factor applied to scores.
        MASKED: whether some query does not see some of the positions.

    Returns:
        `running`, updated with the positions of the block.
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
    # Until a query has seen a position, its largest score is -inf.
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
    """Return the page of the positions from `start` on, or one page per position if the block spans several pages.

    Positions after `end` get an arbitrary page. Kernels load the page one iteration ahead. If a load depends on another
    load of the same iteration, Triton keeps only half as many blocks in flight.
    """
    positions = start if BLOCK <= PAGE else start + tl.arange(0, BLOCK)
    return tl.load(pages + positions // PAGE, positions < end, 0).to(tl.int64)


@triton.jit
def tile_of(kv_head, first, count, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Map the TILE rows of a product to queries: all heads of a KV head for one token, then the next token.

    Args:
        first: first token of the tile.
        count: number of tokens in the span.

    Returns:
        Token and head of each row, and whether the row is in use; the last rows may be unused.
    """
    rows = tl.arange(0, TILE)
    tokens = first + rows // GROUP
    return tokens, kv_head * GROUP + rows % GROUP, (rows < TILE // GROUP * GROUP) & (tokens < count)
