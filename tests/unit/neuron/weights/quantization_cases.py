"""Test matrices for quantization: realistic weights and extreme cases."""

from collections.abc import Callable

import torch
from torch import Tensor


def heavy_tailed(rows: int, columns: int) -> Tensor:
    """Return random float32 weights of different magnitudes with outliers, similar to the weights of real models."""
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(rows, columns, generator=generator)
    tail = torch.randn(rows, columns, generator=generator).square().mul(0.5).add(0.7)
    return normal * tail * torch.rand(rows, 1, generator=generator).mul(0.04)


def _outlier() -> Tensor:
    rows = heavy_tailed(4, 512)
    rows[:, 100] = 30.0
    return rows


HARD: dict[str, Callable[[], Tensor]] = {
    "constant": lambda: torch.full((2, 256), 0.37),
    "negative constant": lambda: torch.full((2, 256), -0.37),
    "positive": lambda: heavy_tailed(4, 512).abs() + 0.01,
    "negative": lambda: -heavy_tailed(4, 512).abs() - 0.01,
    "offset": lambda: heavy_tailed(4, 512) * 0.01 + 1.0,
    "two values": lambda: torch.where(heavy_tailed(4, 512) > 0, 0.5, -0.25),
    "outlier": _outlier,
    "one nonzero": lambda: torch.eye(256)[:4],
    "subnormal": lambda: heavy_tailed(4, 512) * 1e-38,
    "tiny": lambda: heavy_tailed(4, 512) * 1e-5,
    "largest": lambda: torch.where(heavy_tailed(4, 512) > 0, 32768.0, -32768.0),
}
"""Name of a case -> function that returns a matrix. The row lengths are multiples of 256."""
