"""Linear operators on quantized matrices: selection of kernels by row count."""

from collections.abc import Sequence

import torch
from torch import Tensor

from helexa.neuron.ops.triton.card import Card
from helexa.neuron.ops.triton.products.dequantize import dequantize
from helexa.neuron.ops.triton.products.gemm import multiply_tiles, on_tensor_cores, tiles
from helexa.neuron.ops.triton.products.gemv import multiply_rows
from helexa.neuron.ops.triton.products.packed import PackedMatrix, alike, join

SCRATCH_BYTES = 64 << 20
"""Bytes of the scratch memory in which large products dequantize matrices part by part."""

_MANY = 512  # up to this row count, each 128 rows dequantize the tiles again; above, cuBLAS (estimated, not measured)
_FEW = 8  # row count up to which each row reads the matrix, on GPUs without tensor cores in Triton


def kernel_for(rows: int, dtype: torch.dtype, card: Card) -> str:
    """Return the kernel for a product of `rows` rows: `rows` (one by one), `tiles`, or `plain` (cuBLAS).

    For a given kernel and tile shape (up to 16 rows, up to 64 rows, and above), the result of a row does not depend on
    the other rows. cuBLAS does not guarantee this.
    """
    if on_tensor_cores(dtype, card):
        return "rows" if rows == 1 else "tiles" if rows <= _MANY else "plain"
    return "rows" if rows <= _FEW else "plain"


class PackedLinear:
    """`x @ weight.T + bias` for packed matrices, with the outputs of all matrices concatenated.

    Args:
        matrices: matrices of the same format are joined into one product.
        bias: float32, for the concatenated outputs.
        scratch: uint8 [SCRATCH_BYTES].
    """

    def __init__(self, matrices: Sequence[PackedMatrix], bias: Tensor | None, scratch: Tensor, card: Card) -> None:
        self._matrices = joined(matrices)
        widths = [matrix.shape[0] for matrix in self._matrices]
        self._biases = (
            [None] * len(widths) if bias is None else [segment.contiguous() for segment in bias.split(widths)]
        )
        self._outputs = sum(widths)
        self._scratch = scratch
        self._card = card

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrices."""
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
        match kernel_for(rows, x.dtype, self._card):
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
            target = out[:, first : first + weight.shape[0]]
            torch.mm(x, weight.T, out=target)
            if bias is not None:
                target += bias[first : first + weight.shape[0]]


def joined(matrices: Sequence[PackedMatrix]) -> list[PackedMatrix]:
    """Return the same rows in as few matrices as possible."""
    runs: list[list[PackedMatrix]] = []
    for matrix in matrices:
        if runs and alike([*runs[-1], matrix]):
            runs[-1].append(matrix)
        else:
            runs.append([matrix])
    return [join(run) for run in runs]
