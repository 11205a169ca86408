"""Attention parameters of one layer."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionKind:
    """Attention parameters of one layer.

    Attributes:
        scale: factor applied to the products of queries and keys.
        window: number of positions that each query attends to, including its own position; None for all positions.
        sinks: float32 [heads], attention sinks (Xiao et al., 2023): one extra score per head, which is added to the
            softmax but has no value vector. None if the layer has no sinks.
    """

    scale: float
    window: int | None = None
    sinks: Tensor | None = None
