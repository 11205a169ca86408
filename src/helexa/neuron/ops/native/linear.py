"""Linear operators with packed weights, computed by the native kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from helexa.neuron.ops.native.launcher import GATES, Launcher
from helexa.neuron.ops.native.packed import PackedMatrix


class NativeLinear:
    """Linear operator `x @ weight.T + bias` for one or several packed matrices (see `Ops.linear`).

    The operator concatenates the outputs of all matrices.
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
        """Apply the linear operator to T rows x, and return N outputs per row, float32 [T, N].

        Args:
            x: float32 [T, K]. If the operator has a gate, x is [T, 2 * K].
        """
        launcher, rows, columns = self._launcher, x.shape[0], self._columns
        stride = sum(self._widths)
        out = launcher.take(rows, stride)
        if rows == 0:
            return out
        x = x.contiguous()
        inputs: dict[bool, Tensor] = {}
        for plain in sorted(
            {matrix.number is None for matrix in self._matrices}
        ):  # quantized matrices first: `quantise` applies the gate itself, and must read x before the gate
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
            options = {} if plain else {"number": matrix.number}
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
