"""Mixtures of experts: every row passes a few of many gated feed-forward layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from helexa.neuron.ops.linear import LinearOp

MixtureOp = Callable[[Tensor, Tensor], Tensor]
"""x [T, H] and scores of all experts [T, E] -> [T, H]."""


@dataclass(frozen=True)
class Routing:
    """How scores choose a row's experts.

    Attributes:
        chosen: K, how many.
        weights: `shares` are those of the K largest in the softmax over all experts, `normalised` the same made to add
            up to 1; `scores` are the softmax over the K largest scores alone.
    """

    chosen: int
    weights: Literal["shares", "normalised", "scores"]

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> the chosen experts, int64 [T, K], and their weights, float32 [T, K]; `torch.topk` decides ties."""
        if self.weights == "scores":
            largest, chosen = torch.topk(scores, self.chosen, dim=-1)
            return chosen, torch.softmax(largest, dim=-1, dtype=torch.float32)
        shares, chosen = torch.topk(torch.softmax(scores, dim=-1, dtype=torch.float32), self.chosen, dim=-1)
        return chosen, shares / shares.sum(dim=-1, keepdim=True) if self.weights == "normalised" else shares


@dataclass(frozen=True)
class Expert:
    """The weights of one, `down(silu(gate(x)) * up(x))`.

    Attributes:
        gate_up: matrices that make [2 * I, H] side by side, as `Ops.matrix` prepared them.
        down: [H, I], the same.
        gate_up_bias, down_bias: float32 [2 * I] and [H], or None.
    """

    gate_up: Sequence[Any]
    down: Any
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True)
class Clamp:
    """Another activation: `gate * sigmoid(alpha * gate) * (up + 1)`, with gate and up held within `limit`.

    Only `up` is held from below.
    """

    alpha: float
    limit: float

    def __call__(self, gate_up: Tensor) -> None:
        """Change [T, 2 * I] so that `silu(gate) * up` of it is this activation."""
        gate, up = gate_up.chunk(2, dim=-1)
        gate.clamp_(max=self.limit).mul_(self.alpha)
        up.clamp_(-self.limit, self.limit).add_(1).div_(self.alpha)


class Mixture:
    """The chosen experts one after another, each on its rows.

    A row's results are added up in ascending order of experts, so that they do not depend on the rows beside it.
    """

    def __init__(
        self, routing: Routing, gate_ups: Sequence[LinearOp], downs: Sequence[LinearOp], clamp: Clamp | None
    ) -> None:
        self._routing = routing
        self._gate_ups, self._downs = gate_ups, downs
        self._clamp = clamp

    def __call__(self, x: Tensor, scores: Tensor) -> Tensor:
        """See `MixtureOp`."""
        chosen, weights = self._routing(scores)
        out = torch.zeros_like(x)
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)  # by expert, then by row
        rows, scales = order // chosen.shape[1], weights.to(x.dtype).flatten()[order, None]
        start = 0
        for expert, count in enumerate(pairs.bincount().tolist()):
            if not count:
                continue
            these = slice(start, start + count)
            gate_up = self._gate_ups[expert](x[rows[these]])
            if self._clamp is not None:
                self._clamp(gate_up)
            out.index_add_(0, rows[these], self._downs[expert](gate_up) * scales[these])
            start += count
        return out
