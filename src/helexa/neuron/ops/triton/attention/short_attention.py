"""Attention kernels for short spans (decode): several programs divide the positions of a sequence (flash-decoding).

A span is the rows of one sequence in a batch. The positions of a sequence are divided into segments. Each program
computes partial results for some segments, and a second kernel merges the partial results. The division into segments
depends only on the length of the sequence. The result of a row therefore does not depend on the number of programs or
on other sequences in the batch.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false

import triton
import triton.language as tl

from helexa.neuron.ops.triton.attention.attention_block import LOG2_E, attend_block, page_of, tile_of

LEAST_SEGMENT = tl.constexpr(256)
_MERGED = tl.constexpr(16)  # partial results merged per iteration


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
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Write partial attention results of the short spans, for each segment of positions.

    A span is the rows of one sequence. There is one program per tile of a span, KV head, and group of segments.

    Args:
        sums: [T, heads, segments, 2], output: largest score, and sum of weights, of each segment.
        weighted: [T, heads, segments, DIM], output: sum of weighted values of each segment.
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
            query, places, cache, scales, page, start, end, window, factor, page_stride, values_offset,
            PAGE, DIM, BLOCK, True,
        )  # fmt: skip
        page = page_of(pages, start + BLOCK, stop, PAGE, BLOCK)
        complete = ((start + BLOCK) % size == 0) | (start + BLOCK >= stop)
        if complete:
            partial = first_partial + start // size
            tl.store(sums + 2 * partial, largest, present)
            tl.store(sums + 2 * partial + 1, total, present)
            tl.store(weighted + partial[:, None] * DIM + columns[None, :], summed, cells)
        largest = tl.where(complete, float("-inf"), largest)  # a largest score of -inf also clears the sums


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
    """Merge the partial results of `attend_short` into attention outputs, with one program per row and head."""
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
    """Return the number of positions per segment, for a sequence of `length` positions.

    The result is the smallest power of two, at least LEAST_SEGMENT, for which the sequence has at most SEGMENTS
    segments.
    """
    size = length * 0 + LEAST_SEGMENT
    while size * SEGMENTS < length:
        size *= 2
    return size
