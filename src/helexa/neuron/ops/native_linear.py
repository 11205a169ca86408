"""Products with packed weights on the native kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from helexa.neuron.ops.native_launcher import GATES, Launcher
from helexa.neuron.ops.packed import PackedMatrix


class NativeLinear:
    """`x @ weight.T + bias` with the parts' outputs side by side."""

    def __init__(
        self, launcher: Launcher, parts: Sequence[PackedMatrix], bias: Tensor | None, gate: str | None
    ) -> None:
        self._launcher = launcher
        self._gate = gate
        self._parts = parts
        self._bias = None if bias is None else bias.float().contiguous()
        self._columns = parts[0].columns
        self._outputs = sum(part.outputs for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [T, K] -> float32 [T, N]."""
        launcher, rows, columns = self._launcher, x.shape[0], self._columns
        out = launcher.take(rows, self._outputs)
        if rows == 0:
            return out
        x = x.contiguous()
        inputs: dict[bool, Tensor] = {}
        for plain in sorted({part.number is None for part in self._parts}):  # `quantise` reads x before it is gated
            if plain:
                x = launcher.gate_mul(x, self._gate) if self._gate else x
                inputs[plain] = launcher.take(rows, columns, dtype=torch.bfloat16)
                launcher.launch("narrow", x, inputs[plain], rows, columns)
            else:
                inputs[plain] = launcher.take_rounded(rows, columns)
                launcher.launch("quantise", x, inputs[plain], rows, columns, GATES[self._gate], launcher.x_bits)
        first = 0
        for part in self._parts:
            rounded = inputs[part.number is None]
            bias = 0 if self._bias is None else self._bias.data_ptr() + 4 * first
            to = out.data_ptr() + 4 * first
            arguments = (rounded, part.data, to, bias, rows, columns, part.outputs, self._outputs)
            first += part.outputs
            waits = first == self._outputs
            if part.number is None:
                launcher.launch("multiply_plain", *arguments, waits=waits)
            else:
                launcher.launch("multiply", *arguments, part.number, launcher.x_bits, waits=waits)
        return out
