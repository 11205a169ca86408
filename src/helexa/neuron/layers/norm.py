"""RMS normalisation."""

from torch import Tensor

from helexa.neuron.ops.reference import ReferenceOps


class RmsNorm:
    """`x / rms(x) * weight`.

    Args:
        weight: [H], float32.
    """

    def __init__(self, ops: ReferenceOps, weight: Tensor, eps: float) -> None:
        self._ops = ops
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] of any float dtype -> [..., H] of the activation dtype."""
        return self._ops.rms_norm(x, self._weight, self._eps)
