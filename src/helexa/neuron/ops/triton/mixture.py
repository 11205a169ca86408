"""Mixtures of experts in Triton: two matrix products compute all selected experts, without a host synchronization.

A pair is a row and one of its selected experts. If there are few pairs, as in decode with few sequences, the kernels
multiply each pair separately. Otherwise, they sort the pairs by expert and multiply tiles of several pairs.
"""
# pyright: reportGeneralTypeIssues=false

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from helexa.neuron.ops.mixture import Clamp, Routing
from helexa.neuron.ops.triton.gpu_properties import GpuProperties
from helexa.neuron.ops.triton.launch import launch
from helexa.neuron.ops.triton.products.gemm import Blocks, Tiles, multiply_tiles, tiles
from helexa.neuron.ops.triton.products.gemv import multiply_rows
from helexa.neuron.ops.triton.products.packed import LANES, PackedMatrix, alike, join
from helexa.neuron.ops.triton.routing import arrange, route

_BLOCK = 512
_LOAD_COLUMNS = 8  # columns of a plain matrix read per load


class GpuMixture:
    """Mixture-of-experts operator in Triton kernels.

    The outputs of a row's experts are added in descending order of their scores, in float32.

    Args:
        experts: E, the number of experts.
        gate_up: [E * 2 * I, H], the gate and up matrices of all experts; I is an expert's intermediate size.
        down: [E * H, I], the down matrices of all experts.
        biases: biases of `gate_up`, and biases of `down`; each float32 or None.
        routing: rule that selects the experts of each row and their weights.
        clamp: parameters of the clamped activation; None for SiLU.
        dtype: dtype of activations.
        gpu: properties of the GPU.
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
    ) -> None:
        self._experts = experts
        self._gate_up, self._down = gate_up, down
        self._gate_up_bias, self._down_bias = biases
        self._routing = routing
        self._clamp = clamp
        self._dtype = dtype
        self._gpu = gpu

    def __call__(self, x: Tensor, scores: Tensor) -> Tensor:
        """Return the mixture's output [T, H] for inputs x [T, H] and router scores [T, E] of E experts."""
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        chosen, weights = route(scores, self._routing)
        blocks = None
        if not few(chosen.numel(), self._experts, self._routing.chosen):
            blocks = arrange(chosen, self._experts, self._tiles(chosen.numel(), self._gate_up).rows)
        gate_up = self._multiply(x, self._gate_up, self._gate_up_bias, chosen, blocks)
        expert_outputs = self._multiply(_gated(gate_up, self._clamp), self._down, self._down_bias, chosen, blocks)
        rows, width = out.shape
        grid = (rows, -(-width // _BLOCK))
        launch(_add_up, grid, expert_outputs, weights, out, width, warps=4, CHOSEN=self._routing.chosen, BLOCK=_BLOCK)
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
    """Return whether a batch has so few pairs (a row and one of its experts) that each pair is multiplied separately.

    In a small batch, most pairs have different experts, so tiles of several pairs per expert would save nothing.

    Args:
        pairs: number of pairs in the batch.
        experts: number of experts in the layer.
        chosen: number of experts per row.
    """
    return pairs <= max(chosen, experts // 2)


def stacked(matrices: Sequence[PackedMatrix | Tensor]) -> PackedMatrix | Tensor | None:
    """Return the matrices of all experts, stacked into one matrix.

    Returns:
        The stacked matrix; None if the matrices have different formats, or a shape that the kernels do not support.
    """
    packed = [matrix for matrix in matrices if isinstance(matrix, PackedMatrix)]
    plain = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
    if not packed:
        return torch.cat(plain) if plain[0].shape[1] % _LOAD_COLUMNS == 0 else None
    if plain or any(matrix.shape[0] % LANES for matrix in packed) or not alike(packed):
        return None
    return join(packed)


def _gated(gate_up: Tensor, clamp: Clamp | None) -> Tensor:
    """Return the activation [P, I] of `gate_up` [P, 2 * I], the I gate values and I up values of P rows.

    Args:
        clamp: parameters of the clamped activation of gpt-oss; None for the activation `silu(gate) * up`.
    """
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
        gate = tl.where(gate > limit, limit, gate)  # NaN stays NaN
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
    for number in tl.static_range(CHOSEN):
        pair = row * CHOSEN + number
        total += tl.load(weights + pair) * tl.load(expert_outputs + pair * H + column, within, 0.0).to(tl.float32)
    tl.store(out + row * H + column, total.to(out.dtype.element_ty), within)
