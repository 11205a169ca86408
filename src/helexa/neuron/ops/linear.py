"""Linear operators: weights are prepared once and applied to [T, K]."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LinearOp = Callable[[Tensor], Tensor]


class ProductBytes(NamedTuple):
    """Bytes allocated for a matrix product.

    Attributes:
        resident: bytes allocated as long as the product exists; 0 if the product reads the given matrices.
        temporary: bytes in addition to `resident`, freed once the product is prepared.
    """

    resident: int
    temporary: int = 0


class DenseLinear:
    """`x @ weight.T + bias` with a plain weight tensor."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        return F.linear(x, self._weight, self._bias)


class GatedLinear:
    """A matrix product whose input first passes a gate."""

    def __init__(self, gate: Callable[[Tensor], Tensor], product: LinearOp) -> None:
        self._gate = gate
        self._product = product

    def __call__(self, x: Tensor) -> Tensor:
        """[T, 2 * K] -> [T, N]."""
        return self._product(self._gate(x))


class SideBySide:
    """Several products of the same input, with their outputs concatenated."""

    def __init__(self, products: Sequence[LinearOp], bias: Tensor | None) -> None:
        self._products = products
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        out = (
            torch.cat([product(x) for product in self._products], dim=-1)
            if len(self._products) > 1
            else self._products[0](x)
        )
        return out if self._bias is None else out + self._bias
