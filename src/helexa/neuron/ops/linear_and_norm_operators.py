"""Linear and norm operators, prepared with weights and applied to inputs.

A linear operator maps inputs [T, K] of T rows to outputs [T, N]. A norm operator works on the last dimension.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from helexa.neuron import tensors
from helexa.neuron.tensors import DType, Tensor

LinearOp = Callable[[Tensor], Tensor]


class ProductBytes(NamedTuple):
    """Bytes that a linear operator allocates in addition to its matrices."""

    resident: int  # bytes allocated as long as the operator exists; 0 if the operator reads the given matrices
    temporary: int = 0  # bytes that are allocated only during the construction of the operator


class DenseLinear:
    """Linear operator `x @ weight.T + bias` with a plain weight [outputs, inputs]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return N outputs [T, N] for each of T rows x [T, inputs]."""
        return tensors.nn.functional.linear(x, self._weight, self._bias)


HeadLinearOp = Callable[..., Tensor]  # Operator that multiplies each head by its own matrix (see `Ops.head_linear`)


class HeadLinear:
    """Linear operator per head with a plain weight [heads, outputs, inputs]."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor, first: int = 0) -> Tensor:
        """Return [rows, heads, outputs] for the columns of x from `first` on."""
        inputs = x[:, :, first : first + self._weight.shape[2]]
        return tensors.matmul(inputs.transpose(0, 1), self._weight.mT).transpose(0, 1).contiguous()


class GatedLinear:
    """Linear operator `product(gate(x))`, such as a gated down projection."""

    def __init__(self, gate: Callable[[Tensor], Tensor], product: LinearOp) -> None:
        self._gate = gate  # activation function that maps inputs [T, 2 * K] to [T, K]
        self._product = product  # linear operator that is applied to the result of `gate`

    def __call__(self, x: Tensor) -> Tensor:
        """Return N outputs [T, N] for each of T rows x [T, 2 * inputs]."""
        return self._product(self._gate(x))


class ConcatenatedLinear:
    """Linear operator that concatenates the outputs of several operators."""

    def __init__(self, products: Sequence[LinearOp], bias: Tensor | None) -> None:
        self._products = products
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return the concatenated outputs of all operators for x [rows, inputs]."""
        out = (
            tensors.cat([product(x) for product in self._products], dim=-1)
            if len(self._products) > 1
            else self._products[0](x)
        )
        return out if self._bias is None else out + self._bias


class NormOp(Protocol):
    """Operator that computes a norm over the last dimension.

    The RMS norm is `x / rms(x) * weight` (Zhang and Sennrich, 2019). The layer norm is `(x - mean(x)) / deviation(x) *
    weight + bias` (Ba et al., 2016).
    """

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Return the norm [rows, hidden] of each row of x, in the activation dtype.

        If `delta` [rows, hidden] is given, it is first added to x in place. x may have any float dtype.
        """
        ...


@dataclass(frozen=True)
class HeadNorms:
    """The RMS norms of query and key heads of dimension D."""

    query: Tensor  # float32 [D], norm weight that all query heads share
    key: Tensor  # float32 [D], norm weight that all key heads share
    eps: float  # epsilon of the norms
    values: bool = False  # whether each value head is normalized, too, with a weight of 1
    last: bool = False  # whether the norms are applied after RoPE. If False, they are applied before RoPE.


class QueryTemperature(NamedTuple):
    """A factor on queries that grows with their position p, as in Llama 4.

    The factor is `1 + slope * log(1 + floor(p / length))`.
    """

    slope: float
    length: int  # number of positions whose factor is 1


class NoNorm:
    """Operator that adds `delta` as a norm operator does, but does not normalize."""

    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype  # dtype of the result

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, if given, to x [rows, hidden] in place; return x as `dtype`."""
        if delta is not None:
            x += delta
        return x.to(self._dtype)


class RmsNorm:
    """RMS norm operator in float32, in plain torch: `x / rms(x) * weight`."""

    def __init__(self, weight: Tensor, eps: float, dtype: DType) -> None:
        self._weight = weight  # [H], float32
        self._eps = eps
        self._dtype = dtype  # dtype of the result

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, if given, to x [rows, hidden] in place; return the RMS norm of x."""
        if delta is not None:
            x += delta
        x = x.float()
        scale = tensors.rsqrt(x.square().mean(-1, keepdim=True).add_(self._eps))
        return (x * scale).mul_(self._weight).to(self._dtype)


class GroupNorm:
    """RMS norms of groups of adjacent columns in float32, in plain torch."""

    def __init__(self, weight: Tensor, groups: int, eps: float, dtype: DType) -> None:
        self._norm = RmsNorm(weight.view(groups, -1), eps, dtype)  # the weight is float32 [I]
        self._groups = groups

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norms [rows, width] of x [rows, width]."""
        return self._norm(x.unflatten(-1, (self._groups, x.shape[-1] // self._groups))).flatten(-2)


class FewPassRmsNorm:
    """RMS norm operator with fewer passes over the input, which is faster on a CPU."""

    def __init__(self, weight: Tensor, eps: float, dtype: DType) -> None:
        # torch computes the length of a vector in one pass. For x with H numbers, the divisor of the RMS norm is
        # sqrt(mean(x * x) + eps) = length / sqrt(H), where `length` is the length of x with sqrt(H * eps) as an
        # additional number. The weight includes the factor sqrt(H).
        width = weight.shape[-1]
        self._weight = weight * width**0.5
        self._element = weight.new_tensor((width * eps) ** 0.5)
        self._dtype = dtype

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, if given, to x [rows, hidden] in place; return the RMS norm of x."""
        if delta is not None:
            x += delta
        x = x.float()
        length = tensors.hypot(tensors.linalg.vector_norm(x, dim=-1, keepdim=True), self._element)
        return (x * self._weight).div_(length).to(self._dtype)


class LayerNorm:
    """Layer norm operator in float32, in plain torch."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float, dtype: DType) -> None:
        self._weight = weight  # [H], float32
        self._bias = bias  # [H], float32
        self._eps = eps
        self._dtype = dtype  # dtype of the result

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, if given, to x [rows, hidden] in place; return the layer norm of x."""
        if delta is not None:
            x += delta
        return tensors.nn.functional.layer_norm(x.float(), self._weight.shape, self._weight, self._bias, self._eps).to(
            self._dtype
        )
