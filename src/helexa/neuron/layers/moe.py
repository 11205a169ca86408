"""Feed-forward layer with a mixture of experts."""

from torch import Tensor

from helexa.neuron.layers.experts import ExpertReader
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.mlp import GatedMlp
from helexa.neuron.ops.mixture import Clamp, Routing


class SparseMoe:
    """A feed-forward layer in which each row (token) uses a few of E experts (Shazeer et al., 2017).

    Args:
        router: tensor name of the router. The checkpoint has the tensor `<router>.weight` [E, hidden], and optionally
            `<router>.bias`.
        reader: reader of the experts' weights.
        routing: rule that selects the experts of each row and their weights.
        intermediate: intermediate size of each expert.
        clamp: parameters of the clamped activation; None for SiLU.
        shared: expert that all rows use in addition to the selected experts; None for no such expert.
    """

    def __init__(
        self,
        loader: Loader,
        router: str,
        reader: ExpertReader,
        routing: Routing,
        *,
        hidden: int,
        intermediate: int,
        clamp: Clamp | None = None,
        shared: "SharedExpert | None" = None,
    ) -> None:
        self._scores = loader.replicated_linear(router, reader.count, hidden)
        self._experts = reader.mixture(routing, clamp, hidden, intermediate)
        self._shared = shared

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, H] for inputs x [T, H] (T rows, H the hidden size)."""
        out = self._experts(x, self._scores(x))
        return out if self._shared is None else self._shared(x, out)


class SharedExpert:
    """An expert that all rows (tokens) use in addition to the experts that the router selects.

    The names of the expert's weights in the checkpoint start with `prefix.shared_expert`. The linear layer
    `prefix.shared_expert_gate` computes one gate per row, and the sigmoid of the gate multiplies the expert's output.
    """

    def __init__(self, loader: Loader, prefix: str, *, hidden: int, intermediate: int) -> None:
        self._ops = loader.ops
        self._expert = GatedMlp(loader, f"{prefix}.shared_expert", hidden=hidden, intermediate=intermediate)
        self._gate = loader.replicated_linear(f"{prefix}.shared_expert_gate", 1, hidden)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Return the sum of `out` [T, H] and the gated output of this expert for inputs x [T, H].

        T is the number of rows, and H is the hidden size. `out` is the output of the selected experts.
        """
        return self._ops.add_gated(out, self._expert(x), self._gate(x))
