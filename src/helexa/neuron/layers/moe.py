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
        self._scores = loader.linear({name: experts}, hidden)
        self._chosen = chosen
        self._normalised = normalised

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] -> the chosen experts, int64 [T, K], and their weights, float32 [T, K]."""
        shares = torch.softmax(self._scores(x), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(shares, self._chosen, dim=-1)
        return chosen, weights / weights.sum(dim=-1, keepdim=True) if self._normalised else weights


class SparseMoe:
    """A feed-forward layer of which each row uses a part (Shazeer et al., 2017).

    Args:
        intermediate: width of each expert.
        shared: width of an expert that all rows pass, behind a gate of its own (`shared_expert`,
            `shared_expert_gate`); None for none.
        normalised: see `Router`.
    """

    def __init__(
        self,
        loader: Loader,
        prefix: str,
        *,
        hidden: int,
        intermediate: int,
        experts: int,
        chosen: int,
        normalised: bool,
        shared: int | None = None,
    ) -> None:
        self._router = Router(
            loader, f"{prefix}.gate", hidden=hidden, experts=experts, chosen=chosen, normalised=normalised
        )
        self._experts = Experts(
            loader, f"{prefix}.experts", hidden=hidden, intermediate=intermediate, count=experts, chosen=chosen
        )
        self._shared = None
        if shared is not None:
            name = f"{prefix}.shared_expert"
            gate = loader.linear({f"{name}_gate": 1}, hidden)
            self._shared = (GatedMlp(loader, name, hidden=hidden, intermediate=shared), gate)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        out = self._experts(x, *self._router(x))
        if self._shared is None:
            return out
        expert, gate = self._shared
        return out.addcmul_(expert(x), gate(x).double().sigmoid().to(out.dtype))
