"""Token embedding, whose weight the output head may share."""

from typing import Any

from torch import Tensor

from helexa.neuron.ops.protocol import Ops


class Embedding:
    """Rows of a [vocabulary, H] weight. A quantized weight stays quantized; only the requested rows are dequantized.

    Attributes:
        matrix: the weight in the format of the kernels; a head may share it.
        vocab_size: number of rows.
    """

    def __init__(self, ops: Ops, matrix: Any, vocab_size: int) -> None:
        self._ops = ops
        self.matrix = matrix
        self.vocab_size = vocab_size

    def __call__(self, tokens: Tensor, factor: float = 1.0) -> Tensor:
        """Tokens [T] -> float32 [T, H], times `factor`."""
        return self._ops.embedding(self.matrix, tokens, factor)
