"""Operators on several ranks, which gather or add the results of the ranks."""

from collections.abc import Callable

from torch import Tensor

from helexa.neuron.ops.linear import LinearOp
from helexa.neuron.ops.protocol import Ops
from helexa.neuron.ops.ranks.shares import Shares


class GatheredLinear:
    """A linear layer whose outputs are divided among the ranks, followed by an all-gather of the outputs.

    Args:
        product: linear layer that computes the outputs of this rank.
        shares: division of the outputs.
    """

    def __init__(self, ops: Ops, product: LinearOp, shares: Shares) -> None:
        self._ops = ops
        self._product = product
        self._shares = shares

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs of all ranks, [T, N], for inputs x [T, K]."""
        return self._ops.gather(self._product(x), self._shares)


class GatheredInputs:
    """An all-gather of the inputs of a linear layer, followed by the layer.

    Args:
        linear: linear layer that takes the inputs of all ranks.
        shares: division of the inputs.
        gate: activation of a gated input, which this rank applies to its own inputs (see `Ops.gate_mul`); None for no
            gate.
    """

    def __init__(self, ops: Ops, linear: LinearOp, shares: Shares, gate: str | None) -> None:
        self._ops = ops
        self._linear = linear
        self._shares = shares
        self._gate = gate

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs [T, N] for this rank's inputs x, [T, own inputs] or [T, 2 * own inputs] with a gate."""
        own = self._ops.gate_mul(x, self._gate) if self._gate else x
        return self._linear(self._ops.gather(own, self._shares))


class SummedOverRanks:
    """An operator whose results are partial sums, followed by the sum over all ranks.

    Args:
        product: operator that computes the partial sum of this rank.
    """

    def __init__(self, ops: Ops, product: Callable[..., Tensor]) -> None:
        self._ops = ops
        self._product = product

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the sum over all ranks, [T, N], for this rank's inputs."""
        return self._ops.sum_ranks(self._product(*inputs))
