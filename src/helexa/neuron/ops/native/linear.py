"""Linear operators with packed weights, computed by the native kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from helexa.neuron.ops.native.launcher import GATES, Launcher
from helexa.neuron.ops.native.packed import PackedMatrix


class NativeLinear:
    """Linear operator `x @ weight.T + bias` for one or several packed matrices (see `Ops.linear`).

    The outputs of all matrices are concatenated.
    """

    def __init__(
        self, launcher: Launcher, matrices: Sequence[PackedMatrix], bias: Tensor | None, gate: str | None
    ) -> None:
        self._launcher = launcher
        self._gate = gate
        self._matrices = matrices
        self._columns = matrices[0].columns
        self._widths = [matrix.outputs for matrix in matrices]
        self._biases = [None] * len(matrices) if bias is None else bias.float().contiguous().split(self._widths)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs, float32 [T, N], for inputs x, float32 [T, K], or [T, 2 * K] with a gate."""
        launcher, rows, columns = self._launcher, x.shape[0], self._columns
        stride = sum(self._widths)
        out = launcher.take(rows, stride)
        if rows == 0:
            return out
        x = x.contiguous()
        inputs: dict[bool, Tensor] = {}
        for plain in sorted(
            {matrix.number is None for matrix in self._matrices}
        ):  # `quantise` reads x before it is gated
            if plain:
                x = launcher.gate_mul(x, self._gate) if self._gate else x
                inputs[plain] = launcher.take(rows, columns, dtype=torch.bfloat16)
                launcher.launch("narrow", x=x, out=inputs[plain], rows=rows, columns=columns)
            else:
                inputs[plain] = launcher.take_rounded(rows, columns)
                options = {"gate": GATES[self._gate], "x_bits": launcher.x_bits}
                launcher.launch("quantise", x=x, out=inputs[plain], rows=rows, columns=columns, **options)
        for matrix, bias, to in zip(self._matrices, self._biases, out.split(self._widths, dim=1), strict=True):
            plain = matrix.number is None
            options = {} if plain else {"number": matrix.number, "x_bits": launcher.x_bits}
            launcher.launch(
                "multiply_plain" if plain else "multiply",
                matrix is self._matrices[-1],
                x=inputs[plain],
                matrix=matrix.data,
                out=to,
                bias=bias,
                rows=rows,
                columns=columns,
                outputs=matrix.outputs,
                stride=stride,
                **options,
            )
        return out
