"""Kernel for the activation of gated feed-forward layers."""

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


@triton.jit
def _gate_mul(gate_up, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = columns < WIDTH
    gate = tl.load(gate_up + row * stride + columns, within, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + columns, within, 0.0).to(tl.float32)
    if GATE == "gelu_tanh":  # 1 + tanh(x) is twice the sigmoid of 2 x
        through = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        tl.static_assert(GATE == "silu")
        through = tl.sigmoid(gate)
    tl.store(out + row * WIDTH + columns, (gate * through * up).to(out.dtype.element_ty), within)
