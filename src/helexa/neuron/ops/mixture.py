"""Mixtures of experts: each row (token) uses a few of many gated feed-forward layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from helexa.neuron.ops.linear import LinearOp

MixtureOp = Callable[[Tensor, Tensor], Tensor]
"""Operator that returns the mixture's output [T, H] for inputs x [T, H] and router scores of all experts [T, E]."""


@dataclass(frozen=True)
class Routing:
    """Rule that selects the experts of each row, and computes their weights, from the router's scores.

    The K experts with the largest scores are selected.

    Attributes:
        chosen: K, number of experts per row.
        weights: how the weights are computed. `shares`: softmax over the scores of all experts. `normalised`: softmax
            over all experts, then scaled so that the K weights add up to 1. `scores`: softmax over only the K largest
            scores.
    """

    chosen: int
    weights: Literal["shares", "normalised", "scores"]

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts, int64 [T, K], and their weights, float32 [T, K], for scores [T, E] of E experts.

        `torch.topk` decides between equal scores.
        """
        if self.weights == "scores":
            largest, chosen = torch.topk(scores, self.chosen, dim=-1)
            return chosen, torch.softmax(largest, dim=-1, dtype=torch.float32)
        shares, chosen = torch.topk(torch.softmax(scores, dim=-1, dtype=torch.float32), self.chosen, dim=-1)
        return chosen, shares / shares.sum(dim=-1, keepdim=True) if self.weights == "normalised" else shares


@dataclass(frozen=True)
class Expert:
    """The weights of one expert, which computes `down(silu(gate(x)) * up(x))`.

    H is the hidden size and I the intermediate size of the expert.

    Attributes:
        gate_up: one or two matrices prepared by `Ops.matrix`. Together they have the I gate rows, then the I up rows,
            with H columns.
        down: matrix [H, I] prepared by `Ops.matrix`.
        gate_up_bias: float32 [2 * I], biases of the gate, then of up; None for no biases.
        down_bias: float32 [H]; None for no bias.
    """

    gate_up: Sequence[Any]
    down: Any
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True)
class Clamp:
    """The clamped activation of gpt-oss experts, `gate * sigmoid(alpha * gate) * (up + 1)`.

    First, `gate` is limited to at most `limit`, and `up` to the range from -`limit` to `limit`.
    """

    alpha: float
    limit: float

    def __call__(self, gate_up: Tensor) -> None:
        """Change `gate_up` [T, 2 * I] in place, so that `silu(gate) * up` of the changed values is this activation.

        Kernels can then compute the usual activation of an expert afterwards.
        """
        gate, up = gate_up.chunk(2, dim=-1)
        gate.clamp_(max=self.limit).mul_(self.alpha)
        up.clamp_(-self.limit, self.limit).add_(1).div_(self.alpha)


class Mixture:
    """Mixture-of-experts operator that runs one expert after another, each on the rows that use it.

    The outputs for a row are added in ascending order of experts. The result therefore does not depend on other rows in
    the batch.

    Args:
        gate_ups: gate and up operator of each expert.
        downs: down operator of each expert, which includes the activation.
        clamp: parameters of the clamped activation; None for SiLU.
    """

    def __init__(
        self, routing: Routing, gate_ups: Sequence[LinearOp], downs: Sequence[LinearOp], clamp: Clamp | None
    ) -> None:
        self._routing = routing
        self._gate_ups, self._downs = gate_ups, downs
        self._clamp = clamp

    def __call__(self, x: Tensor, scores: Tensor) -> Tensor:
        """Return the mixture's output [T, H] for inputs x [T, H] and router scores [T, E] of E experts."""
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
