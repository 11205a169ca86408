"""Norms in Triton. One program adds the output of the previous layer to one row, and normalizes the row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from helexa.neuron.ops.triton.launch import launch


class RmsNorm:
    """RMS norm operator in a Triton kernel; implements `NormOp`.

    Args:
        weight: [H], float32.
        dtype: dtype of the result.
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weight = weight.contiguous()
        self._eps = eps
        self._dtype = dtype

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, if given, to x [T, H] in place, and return the RMS norm of the T rows of x.

        Each row of x and of `delta` must be contiguous in memory.
        """
        rows, width = x.shape
        out = torch.empty((rows, width), dtype=self._dtype, device=x.device)
        block = triton.next_power_of_2(width)
        delta_stride = 0 if delta is None else delta.stride(0)
        strides = (x.stride(0), delta_stride)
        arguments = (x, delta, self._weight, out, *strides, self._eps)
        launch(_add_rms_norm, (rows,), *arguments, warps=_warps(block), WIDTH=width, BLOCK=block)
        return out


class LayerNorm:
    """Layer norm operator in a Triton kernel; implements `NormOp`.

    Args:
        weight: [H], float32.
        bias: [H], float32.
        dtype: dtype of the result.
    """

    def __init__(self, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weights = weight.contiguous(), bias.contiguous()
        self._eps = eps
        self._dtype = dtype

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, if given, to x [T, H] in place, and return the layer norm of the T rows of x.

        Each row of x and of `delta` must be contiguous in memory.
        """
        rows, width = x.shape
        out = torch.empty((rows, width), dtype=self._dtype, device=x.device)
        block = triton.next_power_of_2(width)
        strides = x.stride(0), 0 if delta is None else delta.stride(0)
        arguments = (x, delta, *self._weights, out, *strides, self._eps)
        launch(_add_layer_norm, (rows,), *arguments, warps=_warps(block), WIDTH=width, BLOCK=block)
        return out


def _warps(block: int) -> int:
    """Return the number of warps per program for rows of `block` numbers: 8 numbers per thread, at most 16 warps."""
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
