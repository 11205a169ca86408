"""A feed-forward layer with a mixture of experts."""

from torch import Tensor

from helexa.neuron.layers.experts import ExpertReader
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.mlp import GatedMlp
from helexa.neuron.ops.mixture import Clamp, ExpertShares, Routing


class SparseMoe:
    """A feed-forward layer in which each row uses a few of many experts (Shazeer et al., 2017).

    Args:
        router: name of the router: `router.weight` is [E, hidden] in the checkpoint, `router.bias` is optional.
        reader: reader of the experts.
        intermediate: width of each expert.
        clamp: settings of the clamped activation; None for silu.
        shared: an expert that all rows use; None for no shared expert.
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
        shares = ExpertShares(loader.shares(intermediate), loader.shares(hidden))
        self._scores = loader.replicated_linear(router, reader.count, hidden)
        self._experts = loader.mixture(reader.experts(shares), routing, clamp, shares)
        self._shared = shared

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        out = self._experts(x, self._scores(x))
        return out if self._shared is None else self._shared(x, out)


class SharedExpert:
    """An expert that all rows use (`prefix.shared_expert`), with a gate (`prefix.shared_expert_gate`)."""

    def __init__(self, loader: Loader, prefix: str, *, hidden: int, intermediate: int) -> None:
        self._ops = loader.ops
        self._expert = GatedMlp(loader, f"{prefix}.shared_expert", hidden=hidden, intermediate=intermediate)
        self._gate = loader.replicated_linear(f"{prefix}.shared_expert_gate", 1, hidden)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Return `out` [T, H] plus the gated output of the expert for x [T, H]."""
        return self._ops.add_gated(out, self._expert(x), self._gate(x))
