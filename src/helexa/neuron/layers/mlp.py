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
        shares = loader.input_shares(f"{prefix}.down_proj.weight", intermediate)
        self._gate_up = loader.local_linear(
            {f"{prefix}.gate_proj": shares.own, f"{prefix}.up_proj": shares.own}, hidden
        )
        self._down = loader.reduced_linear(f"{prefix}.down_proj", hidden, shares, act)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, H] for inputs x [T, H] (T rows, H the hidden size)."""
        return self._down(self._gate_up(x))
