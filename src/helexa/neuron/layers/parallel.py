"""Embedding and linear operators whose results are divided among the ranks."""

from collections.abc import Callable
from typing import Any

from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.linear_and_norm_operators import LinearOp
from helexa.neuron.ops.rank_group_and_shares import Shares
from helexa.neuron.tensors import Tensor


class Embedding:
    """Token embedding: returns rows of a weight [vocabulary, hidden] by token id."""

    def __init__(self, ops: Ops, matrix: Any, shares: Shares) -> None:
        self._ops = ops
        # This rank's rows of the weight, in the layout of the kernels. In a model with tied embeddings, the output head
        # uses the same matrix.
        # A quantized weight stays quantized. Each call dequantizes only the requested rows.
        self.matrix = matrix
        self.shares = shares  # division of the weight's rows among the ranks
        self.vocab_size = shares.total  # number of rows of the whole weight

    def __call__(self, tokens: Tensor, factor: float = 1.0) -> Tensor:
        """Return the embeddings of T `tokens`, times `factor`, as float32 [T, hidden]."""
        if len(self.shares.ranges) == 1:
            return self._ops.embedding(self.matrix, tokens, factor)
        # Each token's embedding is on one rank. The other ranks add zeros.
        return self._ops.sum_ranks(self._ops.embedding(self.matrix, tokens, factor, self.shares.own))


class GatheredLinear:
    """A linear layer whose outputs the ranks divide, followed by an all-gather."""

    def __init__(self, ops: Ops, product: LinearOp, shares: Shares) -> None:
        self._ops = ops
        self._product = product  # linear layer that computes the outputs of this rank
        self._shares = shares  # division of the outputs

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs of all ranks, [rows, outputs], for inputs x [rows, inputs]."""
        return self._ops.gather(self._product(x), self._shares)


class GatheredInputs:
    """An all-gather of the inputs of a linear layer, followed by the layer."""

    def __init__(self, ops: Ops, linear: LinearOp, shares: Shares, gate: str | None) -> None:
        self._ops = ops
        self._linear = linear  # linear layer that takes the inputs of all ranks
        self._shares = shares  # division of the inputs
        # activation of a gated input, which this rank applies to its own inputs (see `Ops.gate_mul`); None for no gate
        self._gate = gate

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, outputs] for this rank's inputs [rows, own] (2 * own with a gate)."""
        # The gate is applied before the exchange, which then transfers half as many numbers.
        own = self._ops.gate_mul(x, self._gate) if self._gate else x
        return self._linear(self._ops.gather(own, self._shares))


class SummedOverRanks:
    """An operator whose results are partial sums, followed by the sum over all ranks."""

    def __init__(self, ops: Ops, product: Callable[..., Tensor]) -> None:
        self._ops = ops
        self._product = product  # operator that computes the partial sum of this rank

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the sum over all ranks, [rows, outputs], for this rank's inputs."""
        return self._ops.sum_ranks(self._product(*inputs))
