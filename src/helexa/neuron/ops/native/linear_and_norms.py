"""Linear and norm operators on native kernels."""

from collections.abc import Sequence

from helexa.neuron import tensors
from helexa.neuron.ops.native.launcher import GATES, Launcher
from helexa.neuron.ops.native.packed_weights import PackedMatrix
from helexa.neuron.tensors import Tensor


class NativeLinear:
    """Linear operator `x @ weight.T + bias` of packed matrices (see `Ops.linear`)."""

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
        """Return float32 [rows, N] for x [rows, inputs] (with a gate, [rows, 2 * inputs])."""
        launcher, rows, columns = self._launcher, x.shape[0], self._columns
        stride = sum(self._widths)
        out = launcher.take(rows, stride)
        if rows == 0:
            return out
        # The input is rounded once for all matrices.
        x = x.contiguous()
        inputs: dict[bool, Tensor] = {}
        # Quantized matrices come first: the kernel `quantize` applies the gate itself, so it must read x before
        # `gate_mul` replaces x.
        for plain in sorted({matrix.number is None for matrix in self._matrices}):
            if plain:
                x = launcher.gate_mul(x, self._gate) if self._gate else x
                inputs[plain] = launcher.take(rows, columns, dtype=tensors.bfloat16)
                launcher.launch("narrow", x=x, out=inputs[plain], rows=rows, columns=columns)
            else:
                inputs[plain] = launcher.take_rounded(rows, columns)
                options = {"gate": GATES[self._gate], "x_bits": launcher.x_bits}
                launcher.launch("quantize", x=x, out=inputs[plain], rows=rows, columns=columns, **options)
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


class NativeRmsNorm:
    """RMS norm operator that uses one native kernel."""

    def __init__(self, launcher: Launcher, weight: Tensor, eps: float) -> None:
        self._launcher = launcher
        self._weight = weight.float().contiguous()
        self._eps = eps

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, if given, to x [rows, hidden] in place; return the RMS norm of x."""
        rows, width = x.shape
        out, arguments = self._launcher.take(rows, width), {"x": x, "delta": delta, "weight": self._weight}
        self._launcher.launch("add_rms_norm", **arguments, out=out, rows=rows, width=width, eps=self._eps)
        return out


class NativeGroupNorm:
    """Operator of RMS norms of groups of adjacent columns that uses one native kernel."""

    def __init__(self, launcher: Launcher, weight: Tensor, groups: int, eps: float) -> None:
        self._launcher = launcher
        self._weight = weight.float().contiguous()
        self._groups = groups
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norms [rows, width] of x [rows, width]."""
        (rows, columns), out = x.shape, self._launcher.take(*x.shape)
        size = {"rows": rows, "groups": self._groups, "width": columns // self._groups}
        self._launcher.launch("group_norm", x=x, weight=self._weight, out=out, **size, eps=self._eps)
        return out


class NativeLayerNorm:
    """Layer norm operator that uses one native kernel."""

    def __init__(self, launcher: Launcher, weight: Tensor, bias: Tensor, eps: float) -> None:
        self._launcher = launcher
        self._weights = {"weight": weight.float().contiguous(), "bias": bias.float().contiguous()}
        self._eps = eps

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, if given, to x [rows, hidden] in place; return the layer norm of x."""
        rows, width = x.shape
        out, arguments = self._launcher.take(rows, width), {"x": x, "delta": delta, **self._weights}
        self._launcher.launch("add_layer_norm", **arguments, out=out, rows=rows, width=width, eps=self._eps)
        return out
