"""Mixtures of experts on the native kernels, with a few kernel calls for all experts together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from helexa.neuron.ops.constants import MAX_EXPERTS, SILU
from helexa.neuron.ops.mixture import Clamp, Expert, ExpertShares, Routing
from helexa.neuron.ops.native.launcher import Launcher
from helexa.neuron.ops.native.packed import PackedMatrix


class NativeMixture:
    """Mixture-of-experts operator on native kernels. Among equal scores, it selects the expert with the lower index."""

    def __init__(
        self,
        launcher: Launcher,
        experts: Sequence[Expert],
        routing: Routing,
        clamp: Clamp | None,
        shares: ExpertShares | None,
    ) -> None:
        self._launcher = launcher
        self._shares = shares
        self._count, self._routing, self._clamp = len(experts), routing, clamp
        self._gate_up = _Products(launcher, [expert.gate_up for expert in experts], [e.gate_up_bias for e in experts])
        self._down = _Products(launcher, [[expert.down] for expert in experts], [e.down_bias for e in experts])

    @staticmethod
    def fits(experts: Sequence[Expert]) -> bool:
        """Return whether the kernels support the experts: at most 4096, all with the same formats and sizes."""
        forms = {tuple((matrix.number, matrix.outputs) for matrix in (*e.gate_up, e.down)) for e in experts}
        return len(forms) == 1 and len(experts) <= MAX_EXPERTS

    def __call__(self, x: Tensor, scores: Tensor) -> Tensor:
        """Return the mixture's output [T, H] for inputs x [T, H] and router scores [T, E] of E experts."""
        launcher, rows, chosen, experts = self._launcher, x.shape[0], self._routing.chosen, self._count
        if rows == 0:
            return launcher.take(*x.shape)
        pairs, places = launcher.take(rows * chosen, dtype=torch.int32), launcher.take(rows, chosen, dtype=torch.int64)
        starts, weights = launcher.take(experts + 1, dtype=torch.int64), launcher.take(rows, chosen)
        launcher.launch(
            "route",
            scores=scores,
            pairs=pairs,
            starts=starts,
            places=places,
            weights=weights,
            rows=rows,
            experts=experts,
            chosen=chosen,
            normalised=self._routing.weights != "shares",
        )
        gate_up = self._gate_up(launcher.choose_rows(x, pairs), starts, gated=False)
        if self._clamp is not None:
            size = {"rows": len(gate_up), "width": gate_up.shape[1] // 2}
            launcher.launch("clamp_gate_up", gate_up=gate_up, **size, alpha=self._clamp.alpha, limit=self._clamp.limit)
        if self._shares is None:
            expert_outputs = self._down(gate_up, starts, gated=True)
        else:
            hidden = launcher.gather(launcher.gate_mul(gate_up, "silu"), self._shares.intermediate)
            expert_outputs = self._down(hidden, starts, gated=False)
        out = launcher.sum_pairs(expert_outputs, places, weights)
        return out if self._shares is None else launcher.gather(out, self._shares.hidden)


class _Products:
    """A linear layer of all experts, which applies the weights of each expert to the rows that selected the expert.

    A pair is a row and one of its selected experts. The pairs are sorted by expert.
    """

    def __init__(
        self, launcher: Launcher, matrices_of_expert: Sequence[Sequence[PackedMatrix]], biases: Sequence[Tensor | None]
    ) -> None:
        self._launcher = launcher
        self._matrices_of_expert = matrices_of_expert  # also keeps the memory at these addresses allocated
        self._addresses = torch.tensor(
            [[matrix.data.data_ptr() for matrix in stack] for stack in zip(*matrices_of_expert, strict=True)]
        )
        self._widths = [matrix.outputs for matrix in matrices_of_expert[0]]
        present = [bias.float() for bias in biases if bias is not None]
        self._biases = torch.stack(present).split(self._widths, dim=1) if present else [None] * len(self._widths)

    def __call__(self, x: Tensor, starts: Tensor, gated: bool) -> Tensor:
        """Return the outputs, float32 [pairs, N], for inputs x, float32 [pairs, K]. A pair is a row and an expert.

        Args:
            starts: int64 [experts + 1], index of each expert's first pair.
            gated: True if x is [pairs, 2 * K]. The inputs are then `silu(first half of x) * second half of x`.
        """
        launcher, pairs, experts, columns = (
            self._launcher,
            x.shape[0],
            len(self._matrices_of_expert),
            self._matrices_of_expert[0][0].columns,
        )
        stride = sum(self._widths)
        out = launcher.take(pairs, stride)
        inputs: dict[bool, Tensor] = {}
        for plain in {matrix.number is None for matrix in self._matrices_of_expert[0]}:
            if plain:
                inputs[plain] = launcher.take(pairs, columns, dtype=torch.bfloat16)
                gated_x = launcher.gate_mul(x, "silu") if gated else x
                launcher.launch("narrow", x=gated_x, out=inputs[plain], rows=pairs, columns=columns)
            else:
                inputs[plain] = launcher.take_rounded(pairs, columns)
                launcher.launch(
                    "quantise_experts",
                    starts=starts,
                    x=x,
                    out=inputs[plain],
                    experts=experts,
                    columns=columns,
                    gate=SILU if gated else 0,
                    x_bits=launcher.x_bits,
                )
        targets = out.split(self._widths, dim=1)
        for matrix, addresses, bias, to in zip(
            self._matrices_of_expert[0], self._addresses, self._biases, targets, strict=True
        ):
            launcher.launch(
                "multiply_experts",
                matrix is self._matrices_of_expert[0][-1],
                starts=starts,
                x=inputs[matrix.number is None],
                matrices=addresses,
                out=to,
                bias=bias,
                experts=experts,
                columns=columns,
                outputs=matrix.outputs,
                stride=stride,
                number=-1 if matrix.number is None else matrix.number,
            )
        return out
