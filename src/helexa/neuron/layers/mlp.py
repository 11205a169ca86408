"""The gated feed-forward layer."""

from torch import Tensor

from helexa.neuron.layers.loader import Loader


class GatedMlp:
    """`down(act(gate(x)) * up(x))`, with gate and up as one product (Shazeer, 2020).

    Args:
        act: "silu" or "gelu_tanh".
    """

    def __init__(self, loader: Loader, prefix: str, *, hidden: int, intermediate: int, act: str = "silu") -> None:
        self._gate_up = loader.linear({f"{prefix}.gate_proj": intermediate, f"{prefix}.up_proj": intermediate}, hidden)
        self._down = loader.linear({f"{prefix}.down_proj": hidden}, intermediate, gate=act)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self._down(self._gate_up(x))
