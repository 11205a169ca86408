"""What kernels of attention are made of: tiles of queries, and what these do with one block of positions.

Scores are in units of log2(e), as `exp2` is what processors have.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def take_block(
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
        cache: the first key of the head, by pages; its values lie `values_offset` numbers behind the keys.
        scales: those of a cache of bytes, as float32; None for another cache.
        page: that the positions lie in (see `page_of`).
        end: where the sequence ends; what lies behind is not read.
        window: positions that a query sees, its own included.
        factor: of scores.
        MASKED: some query does not see some of the positions.

    Returns:
        `running`, with the block.
    """
    largest, total, summed = running
    columns = tl.arange(0, queries.shape[1])
    offsets = tl.arange(0, BLOCK)
    positions = start + offsets
    inside = positions % PAGE
    rows = page * page_stride + inside * DIM
    numbers = cache + rows[:, None] + columns[None, :]
    there = columns[None, :] < DIM
    if MASKED:
        there = there & (positions < end)[:, None]
    keys = tl.load(numbers, there, 0)
    scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee") * factor
    if scales is not None:
        # A page of bytes: keys, values, then the scales of keys and of values.
        beside = scales + page * (page_stride // 4) + PAGE * DIM // 2 + inside
        scores *= tl.load(beside, positions < end, 0.0)[None, :]
    if MASKED:
        seen = (positions[None, :] <= places[:, None]) & (positions[None, :] > places[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    rising = tl.maximum(largest, tl.max(scores, 1))
    # A query that has seen nothing yet has no largest score.
    base = tl.where(rising == float("-inf"), 0.0, rising) if MASKED else rising
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(largest - base)
    total = total * shrink + tl.sum(weights, 1)
    if scales is not None:
        weights *= tl.load(beside + PAGE, positions < end, 0.0)[None, :]
    values = tl.load(numbers + values_offset, there, 0).to(queries.dtype)
    summed = tl.dot(weights.to(queries.dtype), values, summed * shrink[:, None], input_precision="ieee")
    return rising, total, summed


@triton.jit
def page_of(pages, start, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The page of positions from `start` on, or of each of them if they fill more than one; any beyond the end.

    Kernels load it a step ahead: for a load that awaits another one in the same step, Triton would keep half as many
    blocks on their way.
    """
    positions = start if BLOCK <= PAGE else start + tl.arange(0, BLOCK)
    return tl.load(pages + positions // PAGE, positions < end, 0).to(tl.int64)


@triton.jit
def tile_of(kv_head, first, count, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Which queries the TILE rows of a product are: all heads of a KV head for one token, for the next, and so on.

    Args:
        first: token of the tile.
        count: of tokens that there are.

    Returns:
        Token and head of each row, and whether it is one; the last rows may be none.
    """
    rows = tl.arange(0, TILE)
    tokens = first + rows // GROUP
    return tokens, kv_head * GROUP + rows % GROUP, (rows < TILE // GROUP * GROUP) & (tokens < count)
