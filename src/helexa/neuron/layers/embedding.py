"""Token embedding, and the output head that may share its weight."""

from torch import Tensor

from helexa.neuron.ops.reference import ReferenceOps
from helexa.neuron.weights.formats import GroupwiseTensor, Weight


class Embedding:
    """Rows of a [vocabulary, H] weight; quantised weights stay quantised and only the rows asked for are decoded."""

    def __init__(self, ops: ReferenceOps, weight: Weight) -> None:
        self._ops = ops
        self.weight = weight.to(ops.device) if isinstance(weight, GroupwiseTensor) else weight.to(ops.device, ops.dtype)

    def __call__(self, tokens: Tensor) -> Tensor:
        """[T] -> float32 [T, H]."""
        return self._ops.embedding(self.weight, tokens)
