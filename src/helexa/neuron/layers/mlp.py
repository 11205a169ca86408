"""The gated feed-forward layer."""

from torch import Tensor

from helexa.neuron.layers.loader import Loader


class GatedMlp:
    """The gated feed-forward layer `down(act(gate(x)) * up(x))` (Shazeer, 2020).

    One matrix product computes both `gate(x)` and `up(x)`.

    Args:
        act: activation of the gate, "silu" or "gelu_tanh".
    """

    def __init__(self, loader: Loader, prefix: str, *, hidden: int, intermediate: int, act: str = "silu") -> None:
        self._ops, self._act = loader.ops, act
        shares = loader.shares(intermediate)
        self._gate_up = loader.local_linear(
            {f"{prefix}.gate_proj": shares.own, f"{prefix}.up_proj": shares.own}, hidden
        )
        self._shares = shares if loader.ranks > 1 else None
        gate = act if self._shares is None else None  # with several ranks, each rank applies the gate before the gather
        self._down = loader.linear(f"{prefix}.down_proj", hidden, intermediate, gate)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, H] for inputs x [T, H] (T rows, H the hidden size)."""
        hidden = self._gate_up(x)
        if self._shares is not None:
            hidden = self._ops.gather(self._ops.gate_mul(hidden, self._act), self._shares)
        return self._down(hidden)
