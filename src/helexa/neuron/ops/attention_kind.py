"""Attention parameters of one layer."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionKind:
    """Attention parameters of one layer; `window` and `sinks` differ between the layers of some models.

    Attributes:
        scale: factor applied to the products of queries and keys.
        window: number of positions that each query sees, including its own position; None for all earlier positions.
        sinks: float32 [heads], one extra score per head. The extra score takes its share of the softmax and has no
            value (Xiao et al., 2023). None if the layer has no sinks.
    """

    scale: float
    window: int | None = None
    sinks: Tensor | None = None
