"""Mixtures of experts: each row (token) uses a few of many gated feed-forward layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from helexa.neuron.ops.linear import LinearOp
from helexa.neuron.ops.ranks.shares import Shares

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
        """Return the K experts of each row, int64 [T, K], and their weights, float32 [T, K].

        `torch.topk` decides between equal scores.

        Args:
            scores: [T, E], router scores of E experts for each of T rows.
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
class ExpertShares:
    """The division of each expert's outputs among the ranks that compute the model.

    Attributes:
        intermediate: division of the outputs of the gate and up matrices (intermediate size).
        hidden: division of the outputs of the down matrix (hidden size).
    """

    intermediate: Shares
    hidden: Shares


@dataclass(frozen=True)
class Clamp:
    """The clamped activation of gpt-oss experts, `gate * sigmoid(alpha * gate) * (up + 1)`.

    First, `gate` is limited to at most `limit`, and `up` to the range from `-limit` to `limit`.
    """

    alpha: float
    limit: float

    def __call__(self, gate_up: Tensor) -> None:
        """Change gate and up values in place, so that `silu(gate) * up` is then the clamped activation.

        A kernel for the usual activation `silu(gate) * up` can therefore follow.

        Args:
            gate_up: [T, 2 * I], for each of T rows I gate values, then I up values.
        """
        gate, up = gate_up.chunk(2, dim=-1)
        gate.clamp_(max=self.limit).mul_(self.alpha)
        up.clamp_(-self.limit, self.limit).add_(1).div_(self.alpha)


class Mixture:
    """Mixture-of-experts operator that computes one expert after another, each for the rows that selected it.

    The results of a row are summed in ascending order of experts. The sum therefore does not depend on other rows in
    the batch.

    Args:
        routing: rule that selects the experts of each row and their weights.
        gate_ups: linear operator of each expert's gate and up matrices.
        downs: linear operator of each expert's down matrix.
        clamp: parameters of the clamped activation; None for SiLU.
        gate: activation function. It returns the inputs of `downs` for the outputs [P, 2 * I] of `gate_ups`, where P is
            the number of pairs of a row and an expert. If several ranks compute the model, the function also gathers
            the columns of all ranks.
        gather: function that returns the output columns of all ranks, [T, H], for the columns of this rank.
    """

    def __init__(
        self,
        routing: Routing,
        gate_ups: Sequence[LinearOp],
        downs: Sequence[LinearOp],
        clamp: Clamp | None,
        gate: Callable[[Tensor], Tensor],
        gather: Callable[[Tensor], Tensor],
    ) -> None:
        self._routing = routing
        self._gate_ups, self._downs = gate_ups, downs
        self._clamp = clamp
        self._gate, self._gather = gate, gather

    def __call__(self, x: Tensor, scores: Tensor) -> Tensor:
        """Return the mixture's output [T, H] for inputs x [T, H] and router scores [T, E] of E experts."""
        chosen, weights = self._routing(scores)
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)  # by expert, then by row
        rows, scales = order // chosen.shape[1], weights.to(x.dtype).flatten()[order, None]
        if not len(rows):
            return torch.zeros_like(x)
        counts = {expert: count for expert, count in enumerate(pairs.bincount().tolist()) if count}
        rows_of = dict(zip(counts, rows.split(list(counts.values())), strict=True))
        gate_ups = torch.cat([self._gate_ups[expert](x[rows_of[expert]]) for expert in counts])
        if self._clamp is not None:
            self._clamp(gate_ups)
        inputs = self._gate(gate_ups).split(list(counts.values()))
        outputs = [self._downs[expert](part) for expert, part in zip(counts, inputs, strict=True)]
        out = x.new_zeros(x.shape[0], outputs[0].shape[1])
        for these, output, scale in zip(rows_of.values(), outputs, scales.split(list(counts.values())), strict=True):
            out.index_add_(0, these, output * scale)
        return self._gather(out)
