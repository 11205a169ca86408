"""Normalization operators: weights are prepared once and applied to [..., H]."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class NormOp(Protocol):
    """RMS norm `x / rms(x) * weight` over the last dimension (Zhang and Sennrich, 2019)."""

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta` to x in place, then normalize.

        Args:
            x: [T, H], any float dtype.
            delta: [T, H] or None.

        Returns:
            [T, H] of the activation dtype.
        """
        ...


@dataclass(frozen=True)
class HeadNorms:
    """Norm weights, float32 [D], applied to each query head and each key head before rotation."""

    query: Tensor
    key: Tensor
    eps: float


class RmsNorm:
    """RMS norm in float32, computed directly from its definition.

    Args:
        weight: [H], float32.
        dtype: dtype of the result.
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weight = weight
        self._eps = eps
        self._dtype = dtype

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta` to x [T, H] in place, then return the normalized x."""
        if delta is not None:
            x += delta
        x = x.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(self._eps))
        return (x * scale).mul_(self._weight).to(self._dtype)


class FewPassRmsNorm:
    """RMS norm in fewer passes.

    sqrt(H) * rms(x) is the Euclidean length of x extended by one element sqrt(H * eps).
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        width = weight.shape[-1]
        self._weight = weight * width**0.5
        self._element = weight.new_tensor((width * eps) ** 0.5)
        self._dtype = dtype

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta` to x [T, H] in place, then return the normalized x."""
        if delta is not None:
            x += delta
        x = x.float()
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._element)
        return (x * self._weight).div_(length).to(self._dtype)
