"""The loader: builds layers straight from a checkpoint, tensor by tensor, in the layout the kernels want."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from helexa.neuron.layers.embedding import Embedding
from helexa.neuron.ops.linear import LinearOp
from helexa.neuron.ops.norm import NormOp
from helexa.neuron.ops.reference import ReferenceOps
from helexa.neuron.weights.checkpoint import Checkpoint
from helexa.neuron.weights.formats import GroupwiseTensor, Weight


class Loader:
    """Turns names in a checkpoint into layers.

    Args:
        on_read: called with the bytes of weights read so far.
    """

    def __init__(self, checkpoint: Checkpoint, ops: ReferenceOps, on_read: Callable[[int], None]) -> None:
        self.checkpoint = checkpoint
        self.ops = ops
        self._on_read = on_read
        self._read = 0

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint.names()

    def weight(self, name: str) -> Weight:
        """A tensor as the file has it: plain, or groupwise with its codes kept exactly."""
        weight = self.checkpoint.read(name)
        self._read += _nbytes(weight)
        self._on_read(self._read)
        return weight

    def vector(self, name: str) -> Tensor:
        """A small tensor in float32, on the device."""
        weight = self.weight(name)
        plain = weight.dequantize(torch.float32) if isinstance(weight, GroupwiseTensor) else weight.float()
        return plain.to(self.ops.device)

    def norm(self, name: str, eps: float) -> NormOp:
        """The RMS norm whose weight is `name.weight`."""
        return self.ops.rms_norm(self.vector(f"{name}.weight"), eps)

    def linear(self, *names: str) -> LinearOp:
        """One product for one or several weights `name.weight` that read the same input, outputs side by side."""
        weights = [self.weight(f"{name}.weight") for name in names]
        biases = [self.vector(f"{name}.bias") if f"{name}.bias" in self else None for name in names]
        bias = None
        if any(b is not None for b in biases):
            parts = zip(weights, biases, strict=True)
            bias = torch.cat([torch.zeros(w.shape[0], device=self.ops.device) if b is None else b for w, b in parts])
        return self.ops.linear(_stack(weights), bias)

    def embedding(self, name: str) -> Embedding:
        """The token embedding whose weight is `name.weight`."""
        return Embedding(self.ops, self.weight(f"{name}.weight"))


def _stack(weights: Sequence[Weight]) -> Weight:
    """Several [N_i, K] as one [sum N_i, K]; codes are kept where all parts have the same groups."""
    if len(weights) == 1:
        return weights[0]
    quantised = [w for w in weights if isinstance(w, GroupwiseTensor)]
    if len(quantised) == len(weights) and len({(w.bits, w.group_size) for w in quantised}) == 1:
        return GroupwiseTensor(
            codes=torch.cat([w.codes for w in quantised]),
            scale=torch.cat([w.scale for w in quantised]),
            minimum=torch.cat([w.minimum for w in quantised]),
            bits=quantised[0].bits,
            group_size=quantised[0].group_size,
        )
    return torch.cat([w.dequantize(torch.float32) if isinstance(w, GroupwiseTensor) else w.float() for w in weights])


def _nbytes(weight: Weight) -> int:
    if isinstance(weight, GroupwiseTensor):
        return weight.codes.numel() * weight.bits // 8 + weight.scale.nbytes + weight.minimum.nbytes
    return weight.nbytes
