"""Linear operators, which are prepared once with weights [N, K] and then applied to inputs [T, K] of T rows."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LinearOp = Callable[[Tensor], Tensor]


class ProductBytes(NamedTuple):
    """Number of bytes that a linear operator allocates in addition to the matrices that it is constructed from.

    Attributes:
        resident: bytes allocated as long as the operator exists; 0 if the operator reads the given matrices.
        temporary: bytes that are allocated only during the construction of the operator.
    """

    resident: int
    temporary: int = 0


class DenseLinear:
    """The linear operator `x @ weight.T + bias` with a plain weight tensor [N, K]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear operator to T rows of K inputs x [T, K], and return N outputs per row, [T, N]."""
        return F.linear(x, self._weight, self._bias)


class GatedLinear:
    """Linear operator `product(gate(x))`, such as the down projection of a gated feed-forward layer.

    Args:
        gate: activation function that maps inputs [T, 2 * K] to [T, K].
        product: linear operator that is applied to the result of `gate`.
    """

    def __init__(self, gate: Callable[[Tensor], Tensor], product: LinearOp) -> None:
        self._gate = gate
        self._product = product

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the gate and the linear operator to T rows x [T, 2 * K], and return N outputs per row, [T, N]."""
        return self._product(self._gate(x))


class ConcatenatedLinear:
    """Linear operator that applies several linear operators to the same input and concatenates their outputs."""

    def __init__(self, products: Sequence[LinearOp], bias: Tensor | None) -> None:
        self._products = products
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply all linear operators to T rows x [T, K], and return their concatenated outputs [T, N]."""
        out = (
            torch.cat([product(x) for product in self._products], dim=-1)
            if len(self._products) > 1
            else self._products[0](x)
        )
        return out if self._bias is None else out + self._bias
