"""Linear operators with quantized weights; the number of rows selects the kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from helexa.neuron.ops.triton.dequantize import dequantize
from helexa.neuron.ops.triton.gemm import multiply_tiles, on_tensor_cores, tiles
from helexa.neuron.ops.triton.gemv import multiply_rows
from helexa.neuron.ops.triton.launch_and_graphs import GpuProperties
from helexa.neuron.ops.triton.packed_weights import PackedMatrix, alike, join

# Number of bytes of the scratch memory into which products of many rows dequantize some matrix rows at a time.
SCRATCH_BYTES = 64 << 20

_MANY = 512  # maximum rows for `tiles`, which dequantizes the matrix once per 128 rows (estimated, not measured)
_FEW = 8  # maximum rows for `rows` on GPUs without tensor cores in Triton; each row reads the matrix again


def kernel_for(rows: int, dtype: torch.dtype, gpu: GpuProperties) -> str:
    """Return the name of the linear operator's kernel for `rows` input rows.

    The names are `rows` (each row separately), `tiles` (several rows on tensor cores) and `plain` (dequantize the
    matrix, then cuBLAS). With `rows` and `tiles`, the result of a row depends only on this row, the kernel and the tile
    shape. With cuBLAS, it may also depend on the other rows.
    """
    if on_tensor_cores(dtype, gpu):
        return "rows" if rows == 1 else "tiles" if rows <= _MANY else "plain"
    return "rows" if rows <= _FEW else "plain"


class PackedLinear:
    """Linear operator `x @ weight.T + bias` with packed matrices (see `Ops.linear`).

    The operators share `scratch`, uint8 [SCRATCH_BYTES], memory for dequantized rows.
    """

    def __init__(
        self, matrices: Sequence[PackedMatrix], bias: Tensor | None, scratch: Tensor, gpu: GpuProperties
    ) -> None:
        self._matrices = joined(matrices)
        widths = [matrix.shape[0] for matrix in self._matrices]
        self._biases = (
            [None] * len(widths) if bias is None else [segment.contiguous() for segment in bias.split(widths)]
        )
        self._outputs = sum(widths)
        self._scratch = scratch
        self._gpu = gpu

    @property
    def nbytes(self) -> int:
        """Number of bytes of the packed matrices."""
        return sum(matrix.nbytes for matrix in self._matrices)

    def __call__(self, x: Tensor) -> Tensor:
        """Return N outputs [T, N] for each of T rows x [T, inputs]."""
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
        match kernel_for(rows, x.dtype, self._gpu):
            case "rows":
                multiply_rows(x, matrix, bias, out)
            case "tiles":
                multiply_tiles(x, matrix, bias, out, tiles(rows, matrix, x.dtype, self._gpu))
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
    """Join adjacent matrices of one format, and return the resulting matrices."""
    runs: list[list[PackedMatrix]] = []
    for matrix in matrices:
        if runs and alike([*runs[-1], matrix]):
            runs[-1].append(matrix)
        else:
            runs.append([matrix])
    return [join(run) for run in runs]
