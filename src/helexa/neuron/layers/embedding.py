"""Token embedding."""

from typing import Any

from torch import Tensor

from helexa.neuron.ops.protocol import Ops


class Embedding:
    """A token embedding with a weight [vocabulary, H].

    A quantized weight stays quantized in memory. Only the rows of the requested tokens are dequantized.

    Attributes:
        matrix: the weight, prepared by `Ops.matrix`. The output head uses the same matrix in models with tied weights.
        vocab_size: number of rows of the weight.
    """

    def __init__(self, ops: Ops, matrix: Any, vocab_size: int) -> None:
        self._ops = ops
        self.matrix = matrix
        self.vocab_size = vocab_size

    def __call__(self, tokens: Tensor, factor: float = 1.0) -> Tensor:
        """Return the embeddings of `tokens` [T], multiplied by `factor`, as float32 [T, H]."""
        return self._ops.embedding(self.matrix, tokens, factor)
