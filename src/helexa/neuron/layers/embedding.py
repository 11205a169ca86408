"""Token embedding, whose rows may be divided among several ranks."""

from typing import Any

from torch import Tensor

from helexa.neuron.ops.protocol import Ops
from helexa.neuron.ops.ranks.shares import Shares


class Embedding:
    """Token embedding: returns rows of a weight [vocabulary, H] by token id. H is the hidden size.

    A quantized weight stays quantized in memory. Each call dequantizes only the requested rows.

    Attributes:
        matrix: this rank's rows of the weight, in the layout of the kernels. In a model with tied embeddings, the
            output head uses the same matrix.
        shares: division of the weight's rows among the ranks.
        vocab_size: number of rows of the whole weight.
    """

    def __init__(self, ops: Ops, matrix: Any, shares: Shares) -> None:
        self._ops = ops
        self.matrix = matrix
        self.shares = shares
        self.vocab_size = shares.total

    def __call__(self, tokens: Tensor, factor: float = 1.0) -> Tensor:
        """Return the embeddings of T token ids `tokens`, multiplied by `factor`, as float32 [T, H].

        H is the hidden size.
        """
        if len(self.shares.ranges) == 1:
            return self._ops.embedding(self.matrix, tokens, factor)
        # Each token's embedding is on one rank. The other ranks add zeros.
        return self._ops.sum_ranks(self._ops.embedding(self.matrix, tokens, factor, self.shares.own))
