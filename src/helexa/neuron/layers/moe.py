"""Mixtures of experts: the feed-forward layer, and the reader of its weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from helexa.neuron import tensors
from helexa.neuron.layers.block import GatedMlp
from helexa.neuron.layers.loader import Loader
from helexa.neuron.ops.expert_routing_and_mixture import WITHOUT_GATE, Clamp, Expert, ExpertShares, MixtureOp, Routing
from helexa.neuron.ops.rank_group_and_shares import RowRange, Shares, row_numbers
from helexa.neuron.tensors import Tensor


class ExpertReader:
    """Reads the matrices of E experts, separate or stacked in one tensor.

    H is the hidden size, and I is the intermediate size of an expert. These checkpoint layouts are supported, each with
    optional biases:

    * one matrix per expert: for expert 7, `prefix.7.gate_proj.weight`, `prefix.7.up_proj.weight` and
      `prefix.7.down_proj.weight`
    * stacked, with gate and up in one tensor: `prefix.gate_up_proj` [E, 2 * I, H] with the gate rows first, and
      `prefix.down_proj` [E, H, I]
    * stacked, as in GGUF files: `prefix.gate_proj.weight` and `prefix.up_proj.weight` [E, I, H], and
      `prefix.down_proj.weight` [E, H, I]

    Args:
        names: names of the matrices gate, up and down, such as `("w1", "w3", "w2")`. The gate is None for experts
            without a gate. If gate and up have the same name, they are one tensor.
    """

    def __init__(
        self,
        loader: Loader,
        prefix: str,
        count: int,
        names: tuple[str | None, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        self.loader = loader
        self.prefix = prefix
        self.count = count
        self._gate, self._up, self._down = names

    def mixture(
        self, routing: Routing, clamp: Clamp | None, hidden: int, intermediate: int, act: str = "silu"
    ) -> MixtureOp:
        """Read all experts, and return the operator that computes them on all ranks."""
        act = WITHOUT_GATE if self._gate is None else act
        loader, down = self.loader, self._down_key()
        # Each rank has a part of every expert instead of some whole experts. All ranks then have the same work for
        # every choice of experts.
        inputs = loader.input_shares(down, intermediate)
        if loader.adds_results(down, inputs):
            experts = self._experts(inputs, RowRange(0, hidden, hidden), inputs.own)
            experts = [replace(expert, down_bias=loader.added_once(expert.down_bias)) for expert in experts]
            return loader.sum_over_ranks(loader.mixture(experts, routing, clamp, None, act), hidden)
        outputs = loader.shares(hidden)
        shares = ExpertShares(inputs, outputs) if loader.ranks > 1 else None
        return loader.mixture(self._experts(inputs, outputs.own), routing, clamp, shares, act)

    def matrix(
        self, name: str, shape: tuple[int, int], expert: int, ranges: Sequence[RowRange], columns: RowRange | None
    ) -> Any:
        """Return a part of an expert's matrix in the stacked tensor `name` (see `Loader`)."""
        return self.loader.matrix(name, (self.count, *shape), expert, ranges, columns)

    def biases(self, name: str, width: int) -> Tensor:
        """Return the tensor `name` of the biases of all E experts, float32 [E, width]."""
        return self.loader.plain(name, (self.count, width))

    def _down_key(self) -> str:
        """Return the key of the first expert's down matrix (see `Loader.input_block`)."""
        single = f"{self.prefix}.0.{self._down}.weight"
        stacks = (f"{self.prefix}.{self._down}", f"{self.prefix}.{self._down}.weight")
        return next((f"{name}#0" for name in stacks if name in self.loader), single)

    def _experts(self, inputs: Shares, rows: RowRange, columns: RowRange | None = None) -> list[Expert]:
        """Return all experts, first to last, with the weights of this rank.

        Args:
            inputs: division of the inputs of down, which are the outputs of gate and of up.
            rows, columns: rows and columns of down; None for all columns.
        """
        own, hidden, intermediate = inputs.own, rows.total, inputs.total
        fused = self._up if self._gate == self._up else "gate_up_proj"
        if fused == self._up or f"{self.prefix}.{fused}" in self.loader:
            # Each rank has the same rows of gate as of up, because the outputs of these rows are multiplied with each
            # other.
            both = (own.times(1, 0, 2 * intermediate), own.times(1, intermediate, 2 * intermediate))
            gate_ups = self._matrices({fused: both}, hidden)
        else:
            names = (self._up,) if self._gate is None else (self._gate, self._up)
            gate_ups = self._matrices(dict.fromkeys(names, (own,)), hidden)
        downs = self._matrices({self._down: (rows,)}, intermediate, columns)
        return [
            Expert(gate_up, down, gate_up_bias, down_bias)
            for (gate_up, gate_up_bias), ((down,), down_bias) in zip(gate_ups, downs, strict=True)
        ]

    def _matrices(
        self, outputs: Mapping[str, Sequence[RowRange]], inputs: int, columns: RowRange | None = None
    ) -> list[tuple[list[Any], Tensor | None]]:
        """Return each expert's matrices and concatenated biases (None for no biases).

        Args:
            outputs: for each matrix, the name without the prefix, such as `gate_proj`, and the ranges of the rows to
                return.
            inputs: number of columns of each matrix.
        """
        loader, prefix, experts = self.loader, self.prefix, range(self.count)
        first_name = next(iter(outputs))
        if f"{prefix}.0.{first_name}.weight" in loader:
            return [
                loader.matrices(
                    {f"{prefix}.{expert}.{name}": ranges for name, ranges in outputs.items()}, inputs, columns
                )
                for expert in experts
            ]
        # In safetensors files, the names of stacked tensors do not end with `.weight` or `.bias`.
        weight, bias = ("", "_bias") if f"{prefix}.{first_name}" in loader else (".weight", ".bias")
        biases: list[Any] = [None] * self.count
        if any(f"{prefix}.{name}{bias}" in loader for name in outputs):
            stacked_biases = [
                self.biases(f"{prefix}.{name}{bias}", ranges[0].total)[:, row_numbers(ranges)]
                for name, ranges in outputs.items()
            ]
            # one row of biases for each expert
            biases = list(tensors.cat(stacked_biases, dim=1))
        ranges_by_name = {f"{prefix}.{name}{weight}": ranges for name, ranges in outputs.items()}
        return [
            (
                [
                    self.matrix(name, (ranges[0].total, inputs), expert, ranges, columns)
                    for name, ranges in ranges_by_name.items()
                ],
                biases[expert],
            )
            for expert in experts
        ]


class LatentSpace:
    """The projections of rows to a narrower width before the experts, and back.

    Args:
        width: number of inputs and of outputs of each expert.
        names: names of the projections before and after the experts.
    """

    def __init__(self, loader: Loader, names: tuple[str, str], hidden: int, width: int) -> None:
        self.width = width
        before, after = names
        shares = loader.shares(width), loader.shares(hidden)
        self.project, self.restore = (
            loader.gather_outputs(loader.column_parallel_linear({name: own.own}, inputs), own)
            for name, own, inputs in ((before, shares[0], hidden), (after, shares[1], width))
        )


class SparseMoe:
    """A mixture of E experts, of which each token uses a few (Shazeer et al., 2017).

    Args:
        router: tensor name of the router: `<router>.weight` [E, hidden], and optionally `<router>.bias`.
        shared: expert that all rows use, such as `SharedExpert`. `shared(x, out)` returns `out` plus the output of the
            expert for x. None for no such expert.
        latent: projections before and after the experts that the router selects; None for no projections.
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
        shared: Callable[[Tensor, Tensor], Tensor] | None = None,
        latent: LatentSpace | None = None,
    ) -> None:
        self._scores = loader.replicated_linear(router, reader.count, hidden)
        self._latent = latent
        self._experts = reader.mixture(routing, clamp, hidden if latent is None else latent.width, intermediate)
        self._shared = shared

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output [T, H] for x [T, H] (T rows, H the hidden size)."""
        scores = self._scores(x)
        if self._latent is None:
            out = self._experts(x, scores)
        else:
            out = self._latent.restore(self._experts(self._latent.project(x), scores))
        return out if self._shared is None else self._shared(x, out)


class SharedExpert:
    """An expert that all tokens use, besides those that the router selects.

    `gate` is the name of a linear layer that computes one number per row, whose sigmoid multiplies the expert's output.
    None for no gate.
    """

    def __init__(self, loader: Loader, prefix: str, gate: str | None, *, hidden: int, intermediate: int) -> None:
        self._ops = loader.ops
        self._expert = GatedMlp(loader, prefix, hidden=hidden, intermediate=intermediate)
        self._gate = None if gate is None else loader.replicated_linear(gate, 1, hidden)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Return `out` [rows, hidden] plus the output of this expert for x [rows, hidden]."""
        if self._gate is None:
            return self._ops.add(out, self._expert(x))
        return self._ops.add_gated(out, self._expert(x), self._gate(x))
