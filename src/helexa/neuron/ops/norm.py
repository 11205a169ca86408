"""Norm operators, which are prepared once with their weights and then applied to inputs."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class NormOp(Protocol):
    """Operator that computes a norm over the last dimension.

    The RMS norm is `x / rms(x) * weight` (Zhang and Sennrich, 2019). The layer norm is `(x - mean(x)) / deviation(x) *
    weight + bias` (Ba et al., 2016).
    """

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, if given, to x in place, and return the norm of each row of x.

        Args:
            x: [T, H], T rows of any float dtype; changed in place if `delta` is given.
            delta: [T, H]; None to leave x unchanged.

        Returns:
            [T, H] of the activation dtype.
        """
        ...


@dataclass(frozen=True)
class HeadNorms:
    """The RMS norms of query and key heads, applied before RoPE. D is the head dimension.

    Attributes:
        query: float32 [D], norm weight of each query head.
        key: float32 [D], norm weight of each key head.
        eps: epsilon of both norms.
    """

    query: Tensor
    key: Tensor
    eps: float


class RmsNorm:
    """RMS norm operator in float32 that computes `x / rms(x) * weight` step by step, in plain torch.

    Args:
        weight: [H], float32.
        dtype: dtype of the result.
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weight = weight
        self._eps = eps
        self._dtype = dtype

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, if given, to x [T, H] in place, and return the RMS norm of the T rows of x."""
        if delta is not None:
            x += delta
        x = x.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(self._eps))
        return (x * scale).mul_(self._weight).to(self._dtype)


class FewPassRmsNorm:
    """RMS norm operator with fewer passes over the input, which is faster on a CPU.

    torch computes the length of a vector in one pass. For a vector x of H numbers, sqrt(H) * rms(x), with epsilon, is
    the length of x with sqrt(H * eps) as an additional number.
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        width = weight.shape[-1]
        self._weight = weight * width**0.5
        self._element = weight.new_tensor((width * eps) ** 0.5)
        self._dtype = dtype

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, if given, to x [T, H] in place, and return the RMS norm of the T rows of x."""
        if delta is not None:
            x += delta
        x = x.float()
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._element)
        return (x * self._weight).div_(length).to(self._dtype)


class LayerNorm:
    """Layer norm operator in float32, in plain torch.

    Args:
        weight: [H], float32.
        bias: [H], float32.
        dtype: dtype of the result.
    """

    def __init__(self, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weight = weight
        self._bias = bias
        self._eps = eps
        self._dtype = dtype

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, if given, to x [T, H] in place, and return the layer norm of the T rows of x."""
        if delta is not None:
            x += delta
        return F.layer_norm(x.float(), self._weight.shape, self._weight, self._bias, self._eps).to(self._dtype)
