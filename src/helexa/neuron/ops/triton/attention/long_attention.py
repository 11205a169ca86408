"""Attention kernel for long spans (prefill): each program computes a tile of queries over all earlier positions."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false

import triton
import triton.language as tl

from helexa.neuron.ops.triton.attention.attention_block import LOG2_E, attend_block, page_of, tile_of


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
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Compute attention for spans (the rows of one sequence) of more than `few` rows.

    There is one program per tile of queries, KV head and span.
    """
    W: tl.constexpr = triton.next_power_of_2(DIM)
    span, kv_head = tl.program_id(2), tl.program_id(1)
    row = tl.load(starts + span)
    count = tl.load(starts + span + 1) - row
    # The last tiles see the most positions and begin first.
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
                query, places, cache, scales, page, start, end, window, factor, page_stride, values_offset,
                PAGE, DIM, BLOCK, False,
            )  # fmt: skip
            page = page_of(pages, start + BLOCK, end, PAGE, BLOCK)
    page = page_of(pages, masked_start, end, PAGE, BLOCK)
    for start in range(masked_start, visible_end, BLOCK):
        largest, total, summed = attend_block(
            (largest, total, summed),
            query, places, cache, scales, page, start, end, window, factor, page_stride, values_offset,
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
