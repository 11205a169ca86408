"""Routing of rows to experts in Triton, without a host synchronization.

All tensor shapes depend only on the number of rows, not on the selected experts.
"""
# pyright: reportArgumentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from helexa.neuron.ops.mixture import Routing
from helexa.neuron.ops.triton.launch import launch
from helexa.neuron.ops.triton.products.gemm import Blocks

_STEP = 1024  # pairs processed per iteration


def route(scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the K selected experts of each row, int32 [T, K], best first, and their weights, float32 [T, K].

    `Routing` describes how experts and weights follow from the scores. Among equal scores, the kernel selects the
    expert with the lower index. A row with a NaN score gets NaN weights.

    Args:
        scores: [T, E], router scores of E experts for each row.
    """
    rows, experts = scores.shape
    chosen = torch.empty((rows, routing.chosen), dtype=torch.int32, device=scores.device)
    weights = torch.empty((rows, routing.chosen), dtype=torch.float32, device=scores.device)
    launch(
        _route,
        (rows,),
        *(scores, scores.stride(0), chosen, weights, experts),
        warps=1,
        CHOSEN=routing.chosen,
        SLOTS=triton.next_power_of_2(routing.chosen),
        EXPERTS=triton.next_power_of_2(experts),
        OF_ALL=routing.weights == "shares",
    )
    return chosen, weights


def arrange(chosen: Tensor, experts: int, rows: int) -> Blocks:
    """Sort pairs by expert, and divide them into blocks of at most `rows` pairs with the same expert.

    A pair is a row and one of its selected experts.

    Args:
        chosen: int32, the expert of each pair.
        experts: number of experts in the layer.
    """
    pairs = chosen.numel()
    count = pairs // rows + min(pairs, experts)  # upper bound of the number of blocks
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    bounds = torch.empty((3, count), dtype=torch.int32, device=chosen.device)
    launch(
        _arrange,
        (experts + 1,),
        *(chosen, order, bounds, pairs, experts, count),
        warps=4,
        ROWS=rows,
        EXPERTS=triton.next_power_of_2(experts + 1),
        STEP=_STEP,
    )
    return Blocks(order, bounds)


@triton.jit
def _route(
    scores, stride, chosen, weights, E,
    CHOSEN: constexpr, SLOTS: constexpr, EXPERTS: constexpr, OF_ALL: constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    score = tl.load(scores + row * stride + expert, expert < E, float("-inf")).to(tl.float32)
    shares = tl.exp(score - tl.max(score, 0))
    total = tl.sum(shares, 0)
    # Clamp scores, also NaN, so that all remaining experts stay above -inf, which marks padding and chosen experts.
    remaining = tl.where(expert < E, tl.where(score > -3e38, score, -3e38), float("-inf"))
    slot = tl.arange(0, SLOTS)
    picked = tl.zeros([SLOTS], tl.int32)
    chosen_shares = tl.zeros([SLOTS], tl.float32)
    for number in range(CHOSEN):
        best = tl.argmax(remaining, 0)
        picked = tl.where(slot == number, best, picked)
        chosen_shares = tl.where(slot == number, tl.sum(tl.where(expert == best, shares, 0.0), 0), chosen_shares)
        remaining = tl.where(expert == best, float("-inf"), remaining)
    if not OF_ALL:
        total = tl.sum(chosen_shares, 0) + 0.0 * total
    to = row * CHOSEN + slot
    tl.store(chosen + to, picked, slot < CHOSEN)
    tl.store(weights + to, chosen_shares / total, slot < CHOSEN)


@triton.jit(do_not_specialize=["P", "B"])
def _arrange(chosen, order, bounds, P, E, B, ROWS: constexpr, EXPERTS: constexpr, STEP: constexpr):
    this_expert = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, P, STEP):
        pair = first + tl.arange(0, STEP)
        counts += tl.histogram(tl.load(chosen + pair, pair < P, E), EXPERTS)
    counts = tl.where(expert < E, counts, 0)
    blocks = (counts + ROWS - 1) // ROWS
    place = tl.sum(tl.where(expert < this_expert, counts, 0), 0)
    end = place + tl.sum(tl.where(expert == this_expert, counts, 0), 0)
    block = tl.sum(tl.where(expert < this_expert, blocks, 0), 0)
    if this_expert == E:  # unused blocks
        for unused in range(block, B):
            tl.store(bounds + B + unused, 0)
            tl.store(bounds + 2 * B + unused, 0)
    else:
        for first in range(place, end, ROWS):
            tl.store(bounds + block, this_expert)
            tl.store(bounds + B + block, first)
            tl.store(bounds + 2 * B + block, tl.minimum(first + ROWS, end))
            block += 1
        for first in range(0, P, STEP):
            pair = first + tl.arange(0, STEP)
            matches = (tl.load(chosen + pair, pair < P, E) == this_expert).to(tl.int32)
            tl.store(order + place + tl.cumsum(matches, 0) - 1, pair, matches == 1)
            place += tl.sum(matches, 0)
