"""Norm operators, computed by native kernels."""

from torch import Tensor

from helexa.neuron.ops.native.launcher import Launcher


class NativeRmsNorm:
    """RMS norm operator that uses one native kernel."""

    def __init__(self, launcher: Launcher, weight: Tensor, eps: float) -> None:
        self._launcher = launcher
        self._weight = weight.float().contiguous()
        self._eps = eps

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, if given, to x [T, H] in place, and return the RMS norm of the T rows of x."""
        rows, width = x.shape
        out, arguments = self._launcher.take(rows, width), {"x": x, "delta": delta, "weight": self._weight}
        self._launcher.launch("add_rms_norm", **arguments, out=out, rows=rows, width=width, eps=self._eps)
        return out


class NativeLayerNorm:
    """Layer norm operator that uses one native kernel."""

    def __init__(self, launcher: Launcher, weight: Tensor, bias: Tensor, eps: float) -> None:
        self._launcher = launcher
        self._weights = {"weight": weight.float().contiguous(), "bias": bias.float().contiguous()}
        self._eps = eps

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, if given, to x [T, H] in place, and return the layer norm of the T rows of x."""
        rows, width = x.shape
        out, arguments = self._launcher.take(rows, width), {"x": x, "delta": delta, **self._weights}
        self._launcher.launch("add_layer_norm", **arguments, out=out, rows=rows, width=width, eps=self._eps)
        return out
