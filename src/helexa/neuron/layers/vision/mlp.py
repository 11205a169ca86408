"""Feed-forward layers of vision towers, which compute a limited number of patches at a time."""

from typing import Protocol

import torch
from torch import Tensor

from helexa.neuron.layers.vision.tower_loader import Blocks, TowerLoader, padded_width

_ROWS = 4096  # patches at a time, because the intermediate values of a large image would take much memory


class Mlp(Protocol):
    """A feed-forward layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output [P, H] for inputs x [P, H] (P patches, H the hidden size)."""
        ...


class PlainMlp:
    """The feed-forward layer `down(activation(up(x)))`.

    Args:
        up: name of the first projection.
        down: name of the second projection.
        activation: name of an activation of `Ops.activate`.
    """

    def __init__(
        self, loader: TowerLoader, up: str, down: str, *, hidden: int, intermediate: int, activation: str
    ) -> None:
        self._ops, self._activation = loader.ops, activation
        padded = padded_width(intermediate)
        self._up = loader.padded_linear([up], Blocks(1, intermediate, padded), hidden, hidden)
        self._down = loader.padded_linear([down], Blocks(1, hidden, hidden), intermediate, padded)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output [P, H] for inputs x [P, H] (P patches, H the hidden size)."""
        parts = [self._down(self._ops.activate(self._up(part), self._activation)) for part in x.split(_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class GatedMlp:
    """The feed-forward layer `down(silu(gate(x)) * up(x))`.

    Args:
        prefix: the names of the projections are `prefix.gate_proj`, `prefix.up_proj` and `prefix.down_proj`.
    """

    def __init__(self, loader: TowerLoader, prefix: str, *, hidden: int, intermediate: int) -> None:
        self._ops = loader.ops
        padded = padded_width(intermediate)
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = loader.padded_linear(names, Blocks(1, intermediate, padded), hidden, hidden)
        self._down = loader.padded_linear([f"{prefix}.down_proj"], Blocks(1, hidden, hidden), intermediate, padded)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output [P, H] for inputs x [P, H] (P patches, H the hidden size)."""
        parts = [self._down(self._ops.gate_mul(self._gate_up(part), "silu")) for part in x.split(_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
