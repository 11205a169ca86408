"""Norms and gates in Triton, with one program for one row.

The norm kernel adds the output of the previous layer to the row, and normalizes the row. Each row must be contiguous in
memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from helexa.neuron.ops.triton.launch_and_graphs import launch

_BLOCK = 1024


class RmsNorm:
    """RMS norm operator in a Triton kernel; implements `NormOp`."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weight = weight.contiguous()
        self._eps = eps
        self._dtype = dtype

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, if given, to x [rows, hidden] in place; return the RMS norm of x."""
        rows, width = x.shape
        out = torch.empty((rows, width), dtype=self._dtype, device=x.device)
        block = triton.next_power_of_2(width)
        delta_stride = 0 if delta is None else delta.stride(0)
        strides = (x.stride(0), delta_stride)
        arguments = (x, delta, self._weight, out, *strides, self._eps)
        launch(_add_rms_norm, (rows,), *arguments, warps=_warps(block), WIDTH=width, BLOCK=block)
        return out


class LayerNorm:
    """Layer norm operator in a Triton kernel; implements `NormOp`."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weights = weight.contiguous(), bias.contiguous()
        self._eps = eps
        self._dtype = dtype

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, if given, to x [rows, hidden] in place; return the layer norm of x."""
        rows, width = x.shape
        out = torch.empty((rows, width), dtype=self._dtype, device=x.device)
        block = triton.next_power_of_2(width)
        strides = x.stride(0), 0 if delta is None else delta.stride(0)
        arguments = (x, delta, *self._weights, out, *strides, self._eps)
        launch(_add_layer_norm, (rows,), *arguments, warps=_warps(block), WIDTH=width, BLOCK=block)
        return out


def _warps(block: int) -> int:
    """Return the number of warps for rows of `block` numbers: 8 numbers per thread."""
    return max(1, min(16, block // 256))


@triton.jit
def _add_rms_norm(x, delta, weight, out, x_stride, delta_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    within = columns < WIDTH
    numbers = tl.load(x + row * x_stride + columns, within, 0.0)
    if delta is not None:
        added = numbers.to(tl.float32) + tl.load(delta + row * delta_stride + columns, within, 0.0).to(tl.float32)
        numbers = added.to(x.dtype.element_ty)
        tl.store(x + row * x_stride + columns, numbers, within)
    numbers = numbers.to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers) / WIDTH + eps)
    scaled = numbers * scale * tl.load(weight + columns, within, 0.0)
    tl.store(out + row * WIDTH + columns, scaled.to(out.dtype.element_ty), within)


@triton.jit
def _add_layer_norm(x, delta, weight, bias, out, x_stride, delta_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    within = columns < WIDTH
    numbers = tl.load(x + row * x_stride + columns, within, 0.0)
    if delta is not None:
        added = numbers.to(tl.float32) + tl.load(delta + row * delta_stride + columns, within, 0.0).to(tl.float32)
        numbers = added.to(x.dtype.element_ty)
        tl.store(x + row * x_stride + columns, numbers, within)
    numbers = numbers.to(tl.float32)
    distances = tl.where(within, numbers - tl.sum(numbers) / WIDTH, 0.0)
    scaled = distances * tl.rsqrt(tl.sum(distances * distances) / WIDTH + eps)
    scaled = scaled * tl.load(weight + columns, within, 0.0) + tl.load(bias + columns, within, 0.0)
    tl.store(out + row * WIDTH + columns, scaled.to(out.dtype.element_ty), within)


def gate_mul(gate_up: Tensor, gate: str) -> Tensor:
    """Return `gate(first half) * second half` of `gate_up` [rows, 2 * width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, -(-width // _BLOCK))
    launch(_gate_mul, grid, gate_up, out, gate_up.stride(0), warps=4, WIDTH=width, BLOCK=_BLOCK, GATE=gate)
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    """Return the activation of each number of x [rows, width] (see `Ops.activate`)."""
    x = x.contiguous()
    out = torch.empty_like(x)
    count = x.numel()
    launch(_activate, (-(-count // _BLOCK),), x, out, count, warps=4, BLOCK=_BLOCK, ACTIVATION=activation)
    return out


@triton.jit
def _activate(x, out, count, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    within = places < count
    number = tl.load(x + places, within, 0.0).to(tl.float32)
    tl.store(out + places, (number * _through(number, ACTIVATION)).to(out.dtype.element_ty), within)


@triton.jit
def _through(x, ACTIVATION: tl.constexpr):
    """Return the factor by which an activation multiplies its own input."""
    if ACTIVATION == "gelu":
        factor = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    elif ACTIVATION == "gelu_tanh":  # 1 + tanh(x) is twice the sigmoid of 2 x
        factor = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "relu2":
        factor = tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "silu")
        factor = tl.sigmoid(x)
    return factor


@triton.jit
def _gate_mul(gate_up, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = columns < WIDTH
    gate = tl.load(gate_up + row * stride + columns, within, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + columns, within, 0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (gate * _through(gate, GATE) * up).to(out.dtype.element_ty), within)
