"""Mixture of experts: a router, the experts it chooses for each row, and one that all rows pass."""

import torch
from torch import Tensor

from helexa.neuron.layers.experts import Experts
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.mlp import GatedMlp


class Router:
    """Chooses experts for each row: those with the largest scores, and of equals those that `torch.topk` takes.

    Args:
        name: its weight is `name.weight`, [E, H]; `name.bias` may be there.
        experts: E.
        chosen: K of them for each row.
        normalised: the weights of the chosen add up to 1; else they are their shares among all experts.
    """

    def __init__(self, loader: Loader, name: str, *, hidden: int, experts: int, chosen: int, normalised: bool) -> None:
        self.scores = loader.linear({name: experts}, hidden)
        self.chosen = chosen
        self._normalised = normalised

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] -> the chosen experts, int64 [T, K], and their weights, float32 [T, K]."""
        shares = torch.softmax(self.scores(x), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(shares, self.chosen, dim=-1)
        return chosen, weights / weights.sum(dim=-1, keepdim=True) if self._normalised else weights


class SparseMoe:
    """A feed-forward layer of which each row uses a part (Shazeer et al., 2017)."""

    def __init__(self, router: Router, experts: Experts, shared: "SharedExpert | None" = None) -> None:
        self._router = router
        self._experts = experts
        self._shared = shared

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        out = self._experts(x, *self._router(x))
        return out if self._shared is None else out.add_(self._shared(x))


class SharedExpert:
    """An expert that all rows pass (`shared_expert`), behind a gate of its own (`shared_expert_gate`)."""

    def __init__(self, loader: Loader, prefix: str, *, hidden: int, intermediate: int) -> None:
        self._expert = GatedMlp(loader, f"{prefix}.shared_expert", hidden=hidden, intermediate=intermediate)
        self._gate = loader.linear({f"{prefix}.shared_expert_gate": 1}, hidden)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        # In float32 the sigmoid of a number depends on how many others are beside it.
        return self._expert(x) * self._gate(x).double().sigmoid().to(x.dtype)
