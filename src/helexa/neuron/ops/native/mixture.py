"""Mixtures of experts on native kernels, with a few kernel calls for all experts."""

from collections.abc import Sequence

from helexa.neuron import tensors
from helexa.neuron.ops.expert_routing_and_mixture import WITHOUT_GATE, BestGroups, Clamp, Expert, ExpertShares, Routing
from helexa.neuron.ops.kernel_header import MAX_EXPERTS
from helexa.neuron.ops.native.kernel_library import Argument
from helexa.neuron.ops.native.launcher import GATES, Launcher
from helexa.neuron.ops.native.packed_weights import PackedMatrix
from helexa.neuron.tensors import Tensor


class NativeMixture:
    """Mixture operator on native kernels.

    Among experts with equal scores, the kernels select the expert with the lower index.
    """

    def __init__(
        self,
        launcher: Launcher,
        experts: Sequence[Expert],
        routing: Routing,
        clamp: Clamp | None,
        shares: ExpertShares | None,
        act: str = "silu",
    ) -> None:
        self._launcher = launcher
        self._act = act
        self._shares = shares
        self._count, self._routing, self._clamp = len(experts), routing, clamp
        self._gate_up = GroupedProducts(
            launcher, [expert.gate_up for expert in experts], [e.gate_up_bias for e in experts]
        )
        self._down = GroupedProducts(launcher, [[expert.down] for expert in experts], [e.down_bias for e in experts])

    @staticmethod
    def fits(experts: Sequence[Expert]) -> bool:
        """Return whether there are at most 4096 experts of equal formats and sizes."""
        formats = {tuple((matrix.number, matrix.outputs) for matrix in (*e.gate_up, e.down)) for e in experts}
        return len(formats) == 1 and len(experts) <= MAX_EXPERTS

    def __call__(self, x: Tensor, scores: Tensor) -> Tensor:
        """Return the output for x, both [rows, hidden]; router scores are [rows, experts]."""
        launcher, rows, chosen, experts = self._launcher, x.shape[0], self._routing.top_k, self._count
        if rows == 0:
            return launcher.take(*x.shape)
        pairs, places = (
            launcher.take(rows * chosen, dtype=tensors.int32),
            launcher.take(rows, chosen, dtype=tensors.int64),
        )
        starts, weights = launcher.take(experts + 1, dtype=tensors.int64), launcher.take(rows, chosen)
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
            normalized=self._routing.weights != "shares",
            **_choice(self._routing),
        )
        gate_up = self._gate_up(launcher.choose_rows(x, pairs), starts)
        if self._clamp is not None:
            size = {"rows": len(gate_up), "width": gate_up.shape[1] // 2}
            launcher.launch("clamp_gate_up", gate_up=gate_up, **size, alpha=self._clamp.alpha, limit=self._clamp.limit)
        if self._shares is None and self._act != WITHOUT_GATE:
            expert_outputs = self._down(gate_up, starts, self._act)
        else:
            combine = launcher.activate if self._act == WITHOUT_GATE else launcher.gate_mul
            hidden = combine(gate_up, self._act)
            if self._shares is not None:
                hidden = launcher.gather(hidden, self._shares.intermediate)
            expert_outputs = self._down(hidden, starts)
        out = launcher.sum_pairs(expert_outputs, places, weights)
        return out if self._shares is None else launcher.gather(out, self._shares.hidden)


def _choice(routing: Routing) -> dict[str, Argument]:
    """Return the arguments of the kernel `route` that describe the choice of experts."""
    groups = routing.groups or BestGroups(1, 1, 1)
    return {
        "by_scores": routing.ranks_are_scores,
        "sigmoids": routing.scoring == "sigmoid",
        "bias": routing.bias,
        "factors": routing.factors,
        "groups": groups.count,
        "chosen_groups": groups.top_groups,
        "summed": groups.summed,
    }


class GroupedProducts:
    """A linear layer with several matrices of one format, each for different rows.

    For a mixture, there is one input row for each pair of a row of the batch and one of the row's selected experts. The
    pairs are sorted by expert. In `NativeHeadLinear`, heads take the place of experts.
    """

    def __init__(
        self, launcher: Launcher, matrices_of_expert: Sequence[Sequence[PackedMatrix]], biases: Sequence[Tensor | None]
    ) -> None:
        self._launcher = launcher
        self._matrices_of_expert = matrices_of_expert  # also keeps the memory at `_addresses` allocated
        self._addresses = tensors.tensor(
            [[matrix.data.data_ptr() for matrix in stack] for stack in zip(*matrices_of_expert, strict=True)]
        )
        self._widths = [matrix.outputs for matrix in matrices_of_expert[0]]
        present = [bias.float() for bias in biases if bias is not None]
        self._biases = tensors.stack(present).split(self._widths, dim=1) if present else [None] * len(self._widths)

    def __call__(self, x: Tensor, starts: Tensor, gate: str | None = None) -> Tensor:
        """Return outputs, float32 [pairs, outputs], for inputs x, float32 [pairs, inputs].

        With the activation `gate`, x is [pairs, 2 * inputs] (see `Ops.linear`). `starts` is int64 [experts + 1], the
        index of each expert's first pair.
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
                inputs[plain] = launcher.take(pairs, columns, dtype=tensors.bfloat16)
                gated_x = launcher.gate_mul(x, gate) if gate else x
                launcher.launch("narrow", x=gated_x, out=inputs[plain], rows=pairs, columns=columns)
            else:
                inputs[plain] = launcher.take_rounded(pairs, columns)
                launcher.launch(
                    "quantize_experts",
                    starts=starts,
                    x=x,
                    out=inputs[plain],
                    experts=experts,
                    columns=columns,
                    gate=GATES[gate],
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


class NativeHeadLinear:
    """Linear operator with a packed matrix per head (see `Ops.head_linear`)."""

    def __init__(self, launcher: Launcher, matrices: Sequence[PackedMatrix]) -> None:
        self._launcher = launcher
        self._columns = matrices[0].columns
        self._products = GroupedProducts(launcher, [[matrix] for matrix in matrices], [None] * len(matrices))

    def __call__(self, x: Tensor, first: int = 0) -> Tensor:
        """Return [rows, heads, outputs] for the columns of x from `first` on."""
        launcher, (rows, heads, width) = self._launcher, x.shape
        inputs = launcher.take(heads * rows, self._columns)
        starts = launcher.take(heads + 1, dtype=tensors.int64)
        split = {"heads": heads, "width": width, "first": first, "count": self._columns}
        launcher.launch("split_heads", x=x, out=inputs, starts=starts, rows=rows, **split)
        outputs = self._products(inputs, starts)
        out = launcher.take(rows, heads, outputs.shape[1])
        launcher.launch("join_heads", x=outputs, out=out, rows=rows, heads=heads, width=outputs.shape[1])
        return out
