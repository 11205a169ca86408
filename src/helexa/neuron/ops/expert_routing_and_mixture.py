"""Mixtures of experts: each row (token) uses a few of many feed-forward layers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from helexa.neuron import tensors
from helexa.neuron.ops.linear_and_norm_operators import LinearOp
from helexa.neuron.ops.rank_group_and_shares import Shares
from helexa.neuron.tensors import Tensor

# Operator that returns the mixture's output [T, H] for inputs x [T, H] and router scores of all experts [T, E].
MixtureOp = Callable[[Tensor, Tensor], Tensor]

WITHOUT_GATE = "relu2"  # Activation of experts without a gate: the square of a positive number, and 0 for other numbers

# Number added to a sum of weights before the division by the sum. The sum may be 0, because sigmoids may underflow.
SMALLEST_TOTAL = 1e-20


@dataclass(frozen=True)
class BestGroups:
    """Restriction of a row's choice of experts to the row's best groups of experts.

    The E experts form `count` groups of consecutive experts. A group's rank is the sum of the `summed` largest ranks of
    its experts (see `Routing`).
    """

    count: int  # number of groups, which divides E
    top_groups: int  # number of groups from which a row's experts are chosen
    summed: int

    def __call__(self, ranks: Tensor) -> Tensor:
        """Return `ranks` [rows, experts], with -inf for experts outside the best groups."""
        grouped = ranks.unflatten(1, (self.count, ranks.shape[1] // self.count))
        groups = tensors.topk(grouped, self.summed, dim=-1)[0].sum(dim=-1)
        best = tensors.topk(groups, self.top_groups, dim=-1)[1]
        mask = tensors.full_like(groups, -math.inf).scatter_(1, best, 0.0)
        return (grouped + mask[:, :, None]).flatten(1)


@dataclass(frozen=True)
class Routing:
    """A mixture operator's rule that selects a row's experts and their weights.

    Each expert has a value, computed from the scores, and a rank: its value plus its `bias`. The K experts with the
    largest ranks are selected. Their weights are computed from their values. With `weights="scores"`, the scores are
    used as ranks and as values, and `scoring`, `bias` and `groups` must have their defaults.
    """

    top_k: int  # K, number of experts per row
    # How the weights are computed. `shares`: the values. `normalized`: the values, scaled so that the K weights add up
    # to 1. `scores`: softmax over only the K largest scores.
    weights: Literal["shares", "normalized", "scores"]
    # how the values are computed: softmax over the scores of all experts, or the sigmoid of each score
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    bias: Tensor | None = None  # float32 [E], added to the values for the choice only; None for zeros
    # restriction of the choice to the best groups of experts; None to choose from all experts
    groups: BestGroups | None = None
    # float32 [E], number by which the weight of each expert is finally multiplied; None for ones
    factors: Tensor | None = None

    @property
    def ranks_are_scores(self) -> bool:
        """Whether the order of the ranks is the order of the scores."""
        return self.scoring == "softmax" and self.bias is None and self.groups is None

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's K experts, int64 [rows, K], and weights, float32 [rows, K].

        The scores are [rows, E], for E experts. `torch.topk` decides between equal ranks.
        """
        if self.weights == "scores":
            largest, chosen = tensors.topk(scores, self.top_k, dim=-1)
            weights = tensors.softmax(largest, dim=-1, dtype=tensors.float32)
        else:
            values = scores.float().sigmoid() if self.scoring == "sigmoid" else scores.float().softmax(dim=-1)
            ranks = values if self.bias is None else values + self.bias
            if self.groups is not None:
                ranks = self.groups(ranks)
            chosen = tensors.topk(ranks, self.top_k, dim=-1)[1]
            weights = values.gather(1, chosen)
            if self.weights == "normalized":
                weights = weights / (weights.sum(dim=-1, keepdim=True) + SMALLEST_TOTAL)
        return chosen, weights if self.factors is None else weights * self.factors[chosen]


@dataclass(frozen=True)
class Expert:
    """The weights of one expert of a mixture operator: `down(silu(gate(x)) * up(x))`.

    An expert without a gate computes `down(relu(up(x)) ** 2)`. H is the hidden size and I the intermediate size.
    """

    # One or two matrices prepared by `Ops.matrix`. Together they have the I gate rows, then the I up rows, with H
    # columns. Only the up rows if the expert has no gate.
    gate_up: Sequence[Any]
    down: Any  # matrix [H, I] prepared by `Ops.matrix`
    # float32 [2 * I], biases of the gate, then of up, or [I] without a gate; None for no biases
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None  # float32 [H]; None for no bias


@dataclass(frozen=True)
class ExpertShares:
    """The division of each expert's outputs among the ranks that compute the model."""

    intermediate: Shares  # division of the outputs of the gate and up matrices (intermediate size)
    hidden: Shares  # division of the outputs of the down matrix (hidden size)


@dataclass(frozen=True)
class Clamp:
    """The activation of gpt-oss experts, `gate * sigmoid(alpha * gate) * (up + 1)`.

    First, `gate` is limited to at most `limit`, and `up` to the range from `-limit` to `limit`.
    """

    alpha: float
    limit: float

    def __call__(self, gate_up: Tensor) -> None:
        """Change `gate_up` in place: `silu(gate) * up` then equals the gpt-oss activation."""
        # The caller can then use the usual activation `silu(gate) * up`. With gate' = alpha * gate and up' =
        # (up + 1) / alpha, silu(gate') * up' equals gate * sigmoid(alpha * gate) * (up + 1).
        gate, up = gate_up.chunk(2, dim=-1)
        gate.clamp_(max=self.limit).mul_(self.alpha)
        up.clamp_(-self.limit, self.limit).add_(1).div_(self.alpha)


class Mixture:
    """Mixture operator: one expert after another, for the rows that selected it.

    Args:
        gate_ups: linear operator of each expert's gate and up matrices.
        downs: linear operator of each expert's down matrix.
        clamp: parameters of the clamped activation; None if the experts have no clamp.
        gate: function from the outputs [P, 2 * width] of `gate_ups` to the inputs of `downs`, for P pairs of a row and
            an expert. If several ranks compute the model, the function also gathers the columns of all ranks.
        gather: function that returns the output columns of all ranks, [rows, hidden], for the columns of this rank.
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
        """Return the output for x, both [rows, hidden]; router scores are [rows, experts]."""
        chosen, weights = self._routing(scores)
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)  # by expert, then by row
        rows, scales = order // chosen.shape[1], weights.to(x.dtype).flatten()[order, None]
        if not len(rows):
            return tensors.zeros_like(x)
        counts = {expert: count for expert, count in enumerate(pairs.bincount().tolist()) if count}
        rows_of = dict(zip(counts, rows.split(list(counts.values())), strict=True))
        gate_ups = tensors.cat([self._gate_ups[expert](x[rows_of[expert]]) for expert in counts])
        if self._clamp is not None:
            self._clamp(gate_ups)
        inputs = self._gate(gate_ups).split(list(counts.values()))
        outputs = [self._downs[expert](part) for expert, part in zip(counts, inputs, strict=True)]
        # The results of a row's experts are added in ascending order of experts. The sum therefore does not depend on
        # other rows in the batch.
        out = x.new_zeros(x.shape[0], outputs[0].shape[1])
        for these, output, scale in zip(rows_of.values(), outputs, scales.split(list(counts.values())), strict=True):
            out.index_add_(0, these, output * scale)
        return self._gather(out)
