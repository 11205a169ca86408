"""What one layer's attention looks at, and how."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionKind:
    """How a layer attends; `window` and `sinks` differ between the layers of some models.

    Attributes:
        scale: of the products of queries and keys.
        window: positions that each query sees, its own included; None for all before it.
        sinks: float32 [heads], for each head a score beside those of the positions that takes its share of the softmax
            and has no value (Xiao et al., 2023); None for none.
    """

    scale: float
    window: int | None = None
    sinks: Tensor | None = None
