"""Linear layers whose outputs are divided among the ranks."""

from torch import Tensor

from helexa.neuron.ops.linear import LinearOp
from helexa.neuron.ops.protocol import Ops
from helexa.neuron.ops.ranks.shares import Shares


class GatheredLinear:
    """A linear layer whose outputs are divided among the ranks, followed by an all-gather of the outputs.

    Args:
        product: linear layer that computes the outputs of this rank.
        shares: division of the outputs among the ranks.
    """

    def __init__(self, ops: Ops, product: LinearOp, shares: Shares) -> None:
        self._ops = ops
        self._product = product
        self._shares = shares

    def __call__(self, x: Tensor) -> Tensor:
        """Return the N outputs of all ranks for T rows of K inputs: [T, N] for x [T, K]."""
        return self._ops.gather(self._product(x), self._shares)
