"""Linear operators on quantised matrices: which kernel for how many rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from helexa.neuron.ops.triton.card import Card
from helexa.neuron.ops.triton.products.dequantize import dequantize
from helexa.neuron.ops.triton.products.gemm import multiply_tiles, on_tensor_cores, tiles
from helexa.neuron.ops.triton.products.gemv import multiply_rows
from helexa.neuron.ops.triton.products.packed import PackedMatrix, alike, join

SCRATCH_BYTES = 64 << 20
"""Memory that large products dequantise matrices in, part by part."""

_MANY = 512  # rows up to which tiles are dequantised for each 128 of them; above, once (reckoned, not measured yet)
_FEW = 8  # rows up to which, without tensor cores in Triton, the matrix is rather read for each of them


def way(rows: int, dtype: torch.dtype, card: Card) -> str:
    """How a product of so many rows is computed: `rows` one by one, by `tiles`, or `plain`, by cuBLAS.

    Within a way, and while the tiles are the same (up to 16 rows, up to 64, and above), a row's result does not depend
    on how many others there are. cuBLAS makes no such promise.
    """
    if on_tensor_cores(dtype, card):
        return "rows" if rows == 1 else "tiles" if rows <= _MANY else "plain"
    return "rows" if rows <= _FEW else "plain"


class PackedLinear:
    """`x @ weight.T + bias` for matrices in codes, their outputs side by side.

    Args:
        parts: those that can be joined are one product.
        bias: float32, of all outputs together.
        scratch: uint8 [SCRATCH_BYTES].
    """

    def __init__(self, parts: Sequence[PackedMatrix], bias: Tensor | None, scratch: Tensor, card: Card) -> None:
        self._matrices = joined(parts)
        widths = [matrix.shape[0] for matrix in self._matrices]
        self._biases = [None] * len(widths) if bias is None else [part.contiguous() for part in bias.split(widths)]
        self._outputs = sum(widths)
        self._scratch = scratch
        self._card = card

    @property
    def nbytes(self) -> int:
        """What the matrices take in memory."""
        return sum(matrix.nbytes for matrix in self._matrices)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        x = x.contiguous()
        out = torch.empty((x.shape[0], self._outputs), dtype=x.dtype, device=x.device)
        first = 0
        for matrix, bias in zip(self._matrices, self._biases, strict=True):
            width = matrix.shape[0]
            self._multiply(x, matrix, bias, out[:, first : first + width])
            first += width
        return out

    def _multiply(self, x: Tensor, matrix: PackedMatrix, bias: Tensor | None, out: Tensor) -> None:
        rows = x.shape[0]
        match way(rows, x.dtype, self._card):
            case "rows":
                multiply_rows(x, matrix, bias, out)
            case "tiles":
                multiply_tiles(x, matrix, bias, out, tiles(rows, matrix, x.dtype, self._card))
            case _:
                self._multiply_plain(x, matrix, bias, out)

    def _multiply_plain(self, x: Tensor, matrix: PackedMatrix, bias: Tensor | None, out: Tensor) -> None:
        outputs, columns = matrix.shape
        scratch = self._scratch.view(x.dtype)
        most = max(1, scratch.numel() // columns)
        for first in range(0, outputs, most):
            weight = scratch[: min(most, outputs - first) * columns].view(-1, columns)
            dequantize(matrix, first, weight)
            part = out[:, first : first + weight.shape[0]]
            torch.mm(x, weight.T, out=part)
            if bias is not None:
                part += bias[first : first + weight.shape[0]]


def joined(parts: Sequence[PackedMatrix]) -> list[PackedMatrix]:
    """The same rows in as few matrices as can be."""
    runs: list[list[PackedMatrix]] = []
    for part in parts:
        if runs and alike([*runs[-1], part]):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [join(run) for run in runs]
