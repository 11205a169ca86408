"""Linear operators, which are prepared once with their weights and then applied to inputs [T, K]."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LinearOp = Callable[[Tensor], Tensor]


class ProductBytes(NamedTuple):
    """Number of bytes that a linear operator allocates in addition to the matrices from which it is prepared.

    Attributes:
        resident: bytes allocated as long as the operator exists; 0 if the operator reads the given matrices.
        temporary: bytes that are allocated only while the operator is prepared.
    """

    resident: int
    temporary: int = 0


class DenseLinear:
    """The linear operator `x @ weight.T + bias` with a plain weight tensor [N, K]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs [T, N] for inputs x [T, K]."""
        return F.linear(x, self._weight, self._bias)


class GatedLinear:
    """A linear operator with a gate on its input.

    Args:
        gate: function that maps the input [T, 2 * K] to [T, K].
        product: linear operator that is applied to the result of the gate.
    """

    def __init__(self, gate: Callable[[Tensor], Tensor], product: LinearOp) -> None:
        self._gate = gate
        self._product = product

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs [T, N] for inputs x [T, 2 * K]."""
        return self._product(self._gate(x))


class ConcatenatedLinear:
    """Several linear operators on the same input. Their outputs are concatenated."""

    def __init__(self, products: Sequence[LinearOp], bias: Tensor | None) -> None:
        self._products = products
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return the concatenated outputs [T, N] for inputs x [T, K]."""
        out = (
            torch.cat([product(x) for product in self._products], dim=-1)
            if len(self._products) > 1
            else self._products[0](x)
        )
        return out if self._bias is None else out + self._bias
