"""Kernels for the activations of feed-forward layers, with and without a gate."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from helexa.neuron.ops.triton.launch import launch

_BLOCK = 1024


def gate_mul(gate_up: Tensor, gate: str) -> Tensor:
    """Return `gate(first half) * second half` of `gate_up` [T, 2 * I]. `gate` is `silu` or `gelu_tanh`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, -(-width // _BLOCK))
    launch(_gate_mul, grid, gate_up, out, gate_up.stride(0), warps=4, WIDTH=width, BLOCK=_BLOCK, GATE=gate)
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    """Return the activation of each number of x [T, I]. `activation` is `silu`, `gelu_tanh` or `gelu`."""
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
