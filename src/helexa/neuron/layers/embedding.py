"""Token embedding."""

from typing import Any

from torch import Tensor

from helexa.neuron.ops.protocol import Ops
from helexa.neuron.ops.ranks.shares import Shares


class Embedding:
    """Rows of a [vocabulary, H] weight. A quantized weight stays quantized; only the requested rows are dequantized.

    Attributes:
        matrix: the weight in the format of the kernels, or its rows of this rank; a head may share it.
        shares: division of the rows among the ranks.
        vocab_size: number of rows of all ranks.
    """

    def __init__(self, ops: Ops, matrix: Any, shares: Shares) -> None:
        self._ops = ops
        self.matrix = matrix
        self.shares = shares
        self.vocab_size = shares.total

    def __call__(self, tokens: Tensor, factor: float = 1.0) -> Tensor:
        """Return the embeddings of `tokens` [T], multiplied by `factor`, as float32 [T, H]."""
        if len(self.shares.ranges) == 1:
            return self._ops.embedding(self.matrix, tokens, factor)
        # Each token's embedding is on one rank. The other ranks add zeros.
        return self._ops.sum_ranks(self._ops.embedding(self.matrix, tokens, factor, self.shares.own))
