"""Attention kernels for short spans (decode) and long spans (prefill).

A span is the rows of one sequence in a batch. Scores are multiplied by log2(e), because GPUs compute `exp2` faster than
`exp`.

In a long span, each program computes a tile of queries over all earlier positions. In a short span, several programs
divide the positions of the sequence (flash-decoding): the positions are divided into segments, each program computes
partial results for some segments, and a second kernel merges the partial results. The segments depend only on the
length of the sequence. The result of a row therefore does not depend on the number of programs or on other sequences in
the batch.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

LEAST_SEGMENT = tl.constexpr(256)
_MERGED = tl.constexpr(16)  # partial results merged per iteration


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
    cap,
    page_stride,
    values_offset,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Update the running softmax of M queries with BLOCK positions from `start` on.

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
        cap: soft cap of the scores; None for no cap.
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
    if cap is not None:
        scores = (2 * tl.sigmoid(scores * (2 / cap)) - 1) * cap  # cap * tanh(scores / cap)
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
    """Return the number of the KV page with the BLOCK positions from `start` on.

    If a block is larger than a page, the function returns one page number per position. Positions from `end` on get an
    arbitrary page.
    """
    # Kernels call this function one iteration ahead. If a load depended on another load of the same iteration, Triton
    # would prefetch only half as many blocks.
    positions = start if BLOCK <= PAGE else start + tl.arange(0, BLOCK)
    return tl.load(pages + positions // PAGE, positions < end, 0).to(tl.int64)


@triton.jit
def tile_of(kv_head, first, count, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Return the token and query head of each row of a tile, and a mask of used rows.

    A tile contains first all query heads of the KV head for the token `first` of the span, then for the next token, and
    so on. The last rows may be unused.
    """
    rows = tl.arange(0, TILE)
    tokens = first + rows // GROUP
    return tokens, kv_head * GROUP + rows % GROUP, (rows < TILE // GROUP * GROUP) & (tokens < count)


@triton.jit(do_not_specialize=("pages", "starts", "prefixes", "pages_stride", "few"))
def attend_long(
    queries,
    out,
    cache,
    scales,
    sinks,
    pages,
    starts,
    prefixes,
    pages_stride,
    few,
    queries_stride,
    out_stride,
    head_stride: tl.int64,
    page_stride,
    values_offset: tl.int64,
    window,
    factor,
    cap,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Write the attention of spans of more than `few` rows to `out`.

    There is one program per tile of queries, KV head and span.
    """
    W: tl.constexpr = triton.next_power_of_2(DIM)
    span, kv_head = tl.program_id(2), tl.program_id(1)
    row = tl.load(starts + span)
    count = tl.load(starts + span + 1) - row
    # The last tiles attend to the most positions, so they begin first.
    first = (tl.cdiv(count, TILE // GROUP) - 1 - tl.program_id(0)) * (TILE // GROUP)
    if (count <= few) | (first < 0):
        return
    prefix = tl.load(prefixes + span)
    tokens, heads, present = tile_of(kv_head, first, count, TILE, GROUP)
    columns = tl.arange(0, W)
    cells = present[:, None] & (columns < DIM)[None, :]
    at = (row + tokens).to(tl.int64)[:, None] * queries_stride + heads[:, None] * DIM + columns[None, :]
    query = tl.load(queries + at, cells, 0.0)

    places = prefix + tokens
    end = prefix + count
    visible_end = tl.minimum(prefix + first + TILE // GROUP, end)  # end of the positions that the last query sees
    cache += kv_head.to(tl.int64) * head_stride
    if scales is not None:
        scales += kv_head.to(tl.int64) * (head_stride // 4)
    pages += span.to(tl.int64) * pages_stride
    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    summed = tl.zeros([TILE, W], tl.float32)
    if WINDOWED:
        masked_start = tl.maximum(prefix + first - window + 1, 0) // BLOCK * BLOCK
    else:
        masked_start = (
            (prefix + first + 1) // BLOCK * BLOCK
        )  # positions before `masked_start` are visible to all queries
        page = page_of(pages, 0, end, PAGE, BLOCK)
        for start in range(0, masked_start, BLOCK):
            largest, total, summed = attend_block(
                (largest, total, summed),
                query, places, cache, scales, page, start, end, window, factor, cap, page_stride, values_offset,
                PAGE, DIM, BLOCK, False,
            )  # fmt: skip
            page = page_of(pages, start + BLOCK, end, PAGE, BLOCK)
    page = page_of(pages, masked_start, end, PAGE, BLOCK)
    for start in range(masked_start, visible_end, BLOCK):
        largest, total, summed = attend_block(
            (largest, total, summed),
            query, places, cache, scales, page, start, end, window, factor, cap, page_stride, values_offset,
            PAGE, DIM, BLOCK, True,
        )  # fmt: skip
        page = page_of(pages, start + BLOCK, end, PAGE, BLOCK)
    if sinks is not None:
        sink = tl.load(sinks + heads, present, 0.0) * LOG2_E
        base = tl.maximum(largest, sink)
        total = total * tl.exp2(largest - base) + tl.exp2(sink - base)
        summed *= tl.exp2(largest - base)[:, None]
    at = (row + tokens).to(tl.int64)[:, None] * out_stride + heads[:, None] * DIM + columns[None, :]
    tl.store(out + at, (summed / total[:, None]).to(out.dtype.element_ty), cells)


@triton.jit(do_not_specialize=("pages", "starts", "prefixes", "pages_stride", "few", "most", "segments"))
def attend_short(
    queries,
    sums,
    weighted,
    cache,
    scales,
    pages,
    starts,
    prefixes,
    pages_stride,
    few,
    most,
    segments,
    queries_stride,
    head_stride: tl.int64,
    page_stride,
    values_offset: tl.int64,
    window,
    factor,
    cap,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Write partial attention results of short spans for each segment of positions.

    There is one program per tile of a span, KV head, and group of segments.

    Args:
        sums: [rows, heads, segments, 2], output: largest score, and sum of weights, of each segment.
        weighted: [rows, heads, segments, DIM], output: sum of weighted values of each segment.
        few: maximum number of rows of a short span; the kernel skips longer spans.
        most: upper bound of the number of rows of each short span in the batch.
    """
    W: tl.constexpr = triton.next_power_of_2(DIM)
    TOKENS: tl.constexpr = TILE // GROUP
    tiles = tl.cdiv(most, TOKENS)
    span, kv_head, shares = tl.program_id(0) // tiles, tl.program_id(1), tl.num_programs(2)
    row = tl.load(starts + span)
    count = tl.load(starts + span + 1) - row
    first = tl.program_id(0) % tiles * TOKENS
    if (count > few) | (first >= count):
        return
    prefix = tl.load(prefixes + span)
    size = _segment_size(prefix + count, SEGMENTS)
    end = prefix + tl.minimum(first + TOKENS, count)
    begin = tl.maximum(prefix + first - window + 1, 0)
    lowest = begin // size
    per_program = tl.cdiv(tl.cdiv(end, size) - lowest, shares)
    lowest += tl.program_id(2) * per_program
    begin = tl.maximum(lowest * size, begin // BLOCK * BLOCK)
    stop = tl.minimum((lowest + per_program) * size, end)

    tokens, heads, present = tile_of(kv_head, first, count, TILE, GROUP)
    columns = tl.arange(0, W)
    cells = present[:, None] & (columns < DIM)[None, :]
    at = (row + tokens).to(tl.int64)[:, None] * queries_stride + heads[:, None] * DIM + columns[None, :]
    query = tl.load(queries + at, cells, 0.0)
    places = prefix + tokens
    cache += kv_head.to(tl.int64) * head_stride
    if scales is not None:
        scales += kv_head.to(tl.int64) * (head_stride // 4)
    pages += span.to(tl.int64) * pages_stride
    first_partial = ((row + tokens).to(tl.int64) * (tl.num_programs(1) * GROUP) + heads) * segments
    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    summed = tl.zeros([TILE, W], tl.float32)
    page = page_of(pages, begin, stop, PAGE, BLOCK)
    for start in range(begin, stop, BLOCK):
        largest, total, summed = attend_block(
            (largest, total, summed),
            query, places, cache, scales, page, start, end, window, factor, cap, page_stride, values_offset,
            PAGE, DIM, BLOCK, True,
        )  # fmt: skip
        page = page_of(pages, start + BLOCK, stop, PAGE, BLOCK)
        complete = ((start + BLOCK) % size == 0) | (start + BLOCK >= stop)
        if complete:
            partial = first_partial + start // size
            tl.store(sums + 2 * partial, largest, present)
            tl.store(sums + 2 * partial + 1, total, present)
            tl.store(weighted + partial[:, None] * DIM + columns[None, :], summed, cells)
        # The next block begins a new segment. A largest score of -inf makes `attend_block` ignore the old sums.
        largest = tl.where(complete, float("-inf"), largest)


@triton.jit(do_not_specialize=("starts", "prefixes", "few", "most", "segments"))
def merge_segments(
    sums,
    weighted,
    out,
    sinks,
    starts,
    prefixes,
    few,
    most,
    segments,
    out_stride,
    window,
    DIM: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Merge `attend_short`'s partial results into `out`: one program per row and head."""
    W: tl.constexpr = triton.next_power_of_2(DIM)
    span, token, head = tl.program_id(0) // most, tl.program_id(0) % most, tl.program_id(1)
    row = tl.load(starts + span)
    count = tl.load(starts + span + 1) - row
    if (count > few) | (token >= count):
        return
    place = tl.load(prefixes + span) + token
    size = _segment_size(place - token + count, SEGMENTS)
    columns = tl.arange(0, W)
    row = row.to(tl.int64) + token
    first_partial = (row * tl.num_programs(1) + head) * segments
    largest = float("-inf")
    total = 0.0
    summed = tl.zeros([W], tl.float32)
    if sinks is not None:
        largest = tl.load(sinks + head) * LOG2_E
        total = 1.0
    for start in range(tl.maximum(place - window + 1, 0) // size, place // size + 1, _MERGED):
        number = start + tl.arange(0, _MERGED)
        exists = number <= place // size
        scores = tl.load(sums + 2 * (first_partial + number), exists, float("-inf"))
        weights = tl.load(sums + 2 * (first_partial + number) + 1, exists, 0.0)
        cells = exists[:, None] & (columns < DIM)[None, :]
        values = tl.load(weighted + (first_partial + number)[:, None] * DIM + columns[None, :], cells, 0.0)
        rising = tl.maximum(largest, tl.max(scores, 0))
        share = tl.exp2(scores - rising)
        shrink = tl.exp2(largest - rising)
        total = total * shrink + tl.sum(share * weights, 0)
        summed = summed * shrink + tl.sum(share[:, None] * values, 0)
        largest = rising
    result = (summed / total).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + head * DIM + columns, result, columns < DIM)


@triton.jit
def _segment_size(length, SEGMENTS: tl.constexpr):
    """Return the positions per segment for a sequence of `length` positions.

    The result is the smallest power of two, at least LEAST_SEGMENT, for which the sequence has at most SEGMENTS
    segments.
    """
    size = length * 0 + LEAST_SEGMENT
    while size * SEGMENTS < length:
        size *= 2
    return size
