"""Token embedding, and the output head that may share its weight."""

from typing import Any

from torch import Tensor

from helexa.neuron.ops.protocol import Ops


class Embedding:
    """Rows of a [vocabulary, H] weight; quantised weights stay quantised and only the rows asked for are decoded.

    Attributes:
        matrix: the weight, as the kernels hold it; a head may share it.
        vocab_size: its rows.
    """

    def __init__(self, ops: Ops, matrix: Any, vocab_size: int) -> None:
        self._ops = ops
        self.matrix = matrix
        self.vocab_size = vocab_size

    def __call__(self, tokens: Tensor, factor: float = 1.0) -> Tensor:
        """[T] -> float32 [T, H], times `factor`."""
        return self._ops.embedding(self.matrix, tokens, factor)
