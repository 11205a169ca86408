"""Mixtures of experts in Triton, without a host synchronization.

A pair is a row and one of its selected experts. Two matrix products compute all pairs. If there are few pairs, as in
decode with few sequences, the kernels multiply each pair separately. Otherwise, they sort the pairs by expert and
multiply tiles of several pairs. All tensor shapes depend only on the number of rows, not on the selected experts.
"""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from helexa.neuron.ops.expert_routing_and_mixture import BestGroups, Clamp, Routing
from helexa.neuron.ops.triton.gemm import Blocks, Tiles, multiply_tiles, tiles
from helexa.neuron.ops.triton.gemv import multiply_rows
from helexa.neuron.ops.triton.launch_and_graphs import GpuProperties, launch
from helexa.neuron.ops.triton.norms_and_gates import gate_mul
from helexa.neuron.ops.triton.packed_weights import LANES, PackedMatrix, alike, join

_STEP = 1024  # pairs processed per iteration

_BLOCK = 512
_LOAD_COLUMNS = 8  # columns of a plain matrix read per load


def route(scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return each row's K experts, int32 [rows, K], best first, and float32 weights.

    Among equal scores, the kernel selects the expert with the lower index. A row with a NaN score gets NaN weights.
    """
    rows, experts = scores.shape
    chosen = torch.empty((rows, routing.top_k), dtype=torch.int32, device=scores.device)
    weights = torch.empty((rows, routing.top_k), dtype=torch.float32, device=scores.device)
    groups = routing.groups or BestGroups(1, 1, 1)
    launch(
        _route,
        (rows,),
        *(scores, scores.stride(0), routing.bias, routing.factors, chosen, weights, experts),
        warps=1,
        CHOSEN=routing.top_k,
        SLOTS=triton.next_power_of_2(routing.top_k),
        EXPERTS=triton.next_power_of_2(experts),
        OF_ALL=routing.weights == "shares",
        SIGMOIDS=routing.scoring == "sigmoid",
        GROUPS=groups.count,
        GROUP_SLOTS=triton.next_power_of_2(groups.count),
        CHOSEN_GROUPS=groups.top_groups,
        SUMMED=groups.summed,
    )
    return chosen, weights


def arrange(chosen: Tensor, experts: int, rows: int) -> Blocks:
    """Sort pairs by expert, into blocks of at most `rows` pairs of one expert.

    `chosen` is int32, the expert of each pair.
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
    scores, stride, bias, factors, chosen, weights, E,
    CHOSEN: constexpr, SLOTS: constexpr, EXPERTS: constexpr, OF_ALL: constexpr, SIGMOIDS: constexpr,
    GROUPS: constexpr, GROUP_SLOTS: constexpr, CHOSEN_GROUPS: constexpr, SUMMED: constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    score = tl.load(scores + row * stride + expert, expert < E, float("-inf")).to(tl.float32)
    shares = tl.sigmoid(score) if SIGMOIDS else tl.exp(score - tl.max(score, 0))
    total = tl.sum(shares, 0)
    rank = score
    if SIGMOIDS:
        rank = shares
    if bias is not None:
        if not SIGMOIDS:
            shares = shares / total
            total = total / total  # 1, or NaN if a score is NaN
        rank = shares + tl.load(bias + expert, expert < E, 0.0)
    elif GROUPS > 1:
        rank = shares
    # Clamp ranks, also NaN, so that all remaining experts stay above -inf, which marks padding and chosen experts.
    remaining = tl.where(expert < E, tl.where(rank > -3e38, rank, -3e38), float("-inf"))
    if GROUPS > 1:
        remaining = _of_best_groups(remaining, E, EXPERTS, GROUPS, GROUP_SLOTS, CHOSEN_GROUPS, SUMMED)
    slot = tl.arange(0, SLOTS)
    picked = tl.zeros([SLOTS], tl.int32)
    chosen_shares = tl.zeros([SLOTS], tl.float32)
    for number in range(CHOSEN):
        best = tl.argmax(remaining, 0)
        picked = tl.where(slot == number, best, picked)
        chosen_shares = tl.where(slot == number, tl.sum(tl.where(expert == best, shares, 0.0), 0), chosen_shares)
        remaining = tl.where(expert == best, float("-inf"), remaining)
    if not OF_ALL:
        # The sum may be 0, because sigmoids may underflow. If a score is NaN, `0.0 * total` makes all weights NaN.
        total = tl.sum(chosen_shares, 0) + 1e-20 + 0.0 * total
    elif SIGMOIDS:
        total = 1.0 + 0.0 * total
    weight = chosen_shares / total
    if factors is not None:
        weight *= tl.load(factors + picked)
    to = row * CHOSEN + slot
    tl.store(chosen + to, picked, slot < CHOSEN)
    tl.store(weights + to, weight, slot < CHOSEN)


@triton.jit
def _of_best_groups(
    ranks, E,
    EXPERTS: constexpr, GROUPS: constexpr, GROUP_SLOTS: constexpr, CHOSEN_GROUPS: constexpr, SUMMED: constexpr,
):  # fmt: skip
    # Experts outside the best groups get the rank -3e38, which is above -inf, the mark of padding and chosen experts.
    expert, group = tl.arange(0, EXPERTS), tl.arange(0, GROUP_SLOTS)
    group_of_expert = expert // (E // GROUPS)
    group_ranks = tl.full([GROUP_SLOTS], float("-inf"), tl.float32)
    for number in range(GROUPS):
        inside = tl.where(group_of_expert == number, ranks, float("-inf"))
        rank = tl.max(inside, 0)
        if SUMMED == 2:
            rank += tl.max(tl.where(expert == tl.argmax(inside, 0), float("-inf"), inside), 0)
            rank = tl.maximum(rank, -3e38)
        group_ranks = tl.where(group == number, rank, group_ranks)
    kept = tl.zeros([EXPERTS], tl.int1)
    for _ in range(CHOSEN_GROUPS):
        best = tl.argmax(group_ranks, 0)
        kept = kept | (group_of_expert == best)
        group_ranks = tl.where(group == best, float("-inf"), group_ranks)
    return tl.where(kept | (expert >= E), ranks, -3e38)


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
    if this_expert == E:  # this program marks the unused blocks
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


class GpuMixture:
    """Mixture-of-experts operator in Triton kernels.

    Args:
        gate_up: [E * 2 * I, hidden], the gate and up matrices of all E experts; I is an expert's intermediate size.
        down: [E * hidden, I], the down matrices of all experts.
        biases: biases of `gate_up`, and biases of `down`; each float32 or None.
        dtype: dtype of activations.
    """

    def __init__(
        self,
        experts: int,
        gate_up: PackedMatrix | Tensor,
        down: PackedMatrix | Tensor,
        biases: tuple[Tensor | None, Tensor | None],
        routing: Routing,
        clamp: Clamp | None,
        dtype: torch.dtype,
        gpu: GpuProperties,
        act: str = "silu",
    ) -> None:
        self._experts = experts
        self._gate_up, self._down = gate_up, down
        self._gate_up_bias, self._down_bias = biases
        self._routing = routing
        self._clamp = clamp
        self._act = act
        self._dtype = dtype
        self._gpu = gpu

    def __call__(self, x: Tensor, scores: Tensor) -> Tensor:
        """Return the output for x, both [rows, hidden]; router scores are [rows, experts]."""
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        chosen, weights = route(scores, self._routing)
        blocks = None
        if not few(chosen.numel(), self._experts, self._routing.top_k):
            blocks = arrange(chosen, self._experts, self._tiles(chosen.numel(), self._gate_up).rows)
        gate_up = self._multiply(x, self._gate_up, self._gate_up_bias, chosen, blocks)
        expert_outputs = self._multiply(
            _gated(gate_up, self._clamp, self._act), self._down, self._down_bias, chosen, blocks
        )
        rows, width = out.shape
        grid = (rows, -(-width // _BLOCK))
        launch(_add_up, grid, expert_outputs, weights, out, width, warps=4, CHOSEN=self._routing.top_k, BLOCK=_BLOCK)
        return out

    def _multiply(
        self, x: Tensor, matrix: PackedMatrix | Tensor, bias: Tensor | None, chosen: Tensor, blocks: Blocks | None
    ) -> Tensor:
        pairs = chosen.numel()
        out = torch.empty((pairs, matrix.shape[0] // self._experts), dtype=x.dtype, device=x.device)
        if blocks is None:
            multiply_rows(x, matrix, bias, out, chosen)
        else:
            multiply_tiles(x, matrix, bias, out, self._tiles(pairs, matrix), blocks)
        return out

    def _tiles(self, pairs: int, matrix: PackedMatrix | Tensor) -> Tiles:
        return replace(tiles(pairs // self._experts, matrix, self._dtype, self._gpu), splits=1)


def few(pairs: int, experts: int, chosen: int) -> bool:
    """Return whether a batch has so few pairs that each pair is multiplied separately.

    `chosen` is the number of selected experts per row.
    """
    # In a small batch, most pairs have different experts, so tiles of several pairs per expert would save nothing.
    return pairs <= max(chosen, experts // 2)


def stacked(matrices: Sequence[PackedMatrix | Tensor]) -> PackedMatrix | Tensor | None:
    """Return the matrices of all experts, stacked into one matrix, or None.

    The result is None if the matrices have different formats, or a shape that the kernels do not support.
    """
    packed = [matrix for matrix in matrices if isinstance(matrix, PackedMatrix)]
    plain = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
    if not packed:
        return torch.cat(plain) if plain[0].shape[1] % _LOAD_COLUMNS == 0 else None
    if plain or any(matrix.shape[0] % LANES for matrix in packed) or not alike(packed):
        return None
    return join(packed)


def _gated(gate_up: Tensor, clamp: Clamp | None, act: str) -> Tensor:
    """Return `act(gate) * up`, or the clamped activation, [pairs, width].

    `gate_up` [pairs, 2 * width] has the gate values first.
    """
    if clamp is None and act != "silu":
        return gate_mul(gate_up, act)
    pairs, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((pairs, width), dtype=gate_up.dtype, device=gate_up.device)
    numbers = (0.0, 0.0) if clamp is None else (clamp.alpha, clamp.limit)
    grid = (pairs, -(-width // _BLOCK))
    launch(_gate, grid, gate_up, out, width, *numbers, warps=4, CLAMPED=clamp is not None, BLOCK=_BLOCK)
    return out


@triton.jit
def _gate(gate_up, out, width, alpha, limit, CLAMPED: constexpr, BLOCK: constexpr):
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = column < width
    gate = tl.load(gate_up + 2 * pair * width + column, within, 0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * pair + 1) * width + column, within, 0.0).to(tl.float32)
    if CLAMPED:
        gate = tl.where(gate > limit, limit, gate)  # NaN stays NaN, which `tl.minimum` does not guarantee
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        numbers = gate * tl.sigmoid(gate * alpha) * (up + 1)
    else:
        numbers = gate * tl.sigmoid(gate) * up
    tl.store(out + pair * width + column, numbers.to(out.dtype.element_ty), within)


@triton.jit
def _add_up(expert_outputs, weights, out, H, CHOSEN: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = column < H
    total = tl.zeros([BLOCK], tl.float32)
    # The expert outputs are added in float32, in a fixed order: the expert with the best score first.
    for number in tl.static_range(CHOSEN):
        pair = row * CHOSEN + number
        total += tl.load(weights + pair) * tl.load(expert_outputs + pair * H + column, within, 0.0).to(tl.float32)
    tl.store(out + row * H + column, total.to(out.dtype.element_ty), within)
