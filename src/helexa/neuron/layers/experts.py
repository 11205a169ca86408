"""Read the weights of a layer's experts from a checkpoint, in any of the supported checkpoint layouts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from helexa.neuron.layers.loader import Loader
from helexa.neuron.ops.mixture import Clamp, Expert, ExpertShares, MixtureOp, Routing
from helexa.neuron.ops.ranks.shares import RowRange, Shares, row_numbers


class ExpertReader:
    """Reads the matrices of E experts, which a checkpoint stores separately or stacked in one tensor.

    H is the hidden size, and I is the intermediate size of an expert. These checkpoint layouts are supported, each with
    optional biases:

    * one matrix per expert: for expert 7, `prefix.7.gate_proj.weight`, `prefix.7.up_proj.weight` and
      `prefix.7.down_proj.weight`
    * stacked, with gate and up in one tensor: `prefix.gate_up_proj` [E, 2 * I, H] with the gate rows first, and
      `prefix.down_proj` [E, H, I]
    * stacked, as in GGUF files: `prefix.gate_proj.weight` and `prefix.up_proj.weight` [E, I, H], and
      `prefix.down_proj.weight` [E, H, I]

    Args:
        count: E, the number of experts.
    """

    def __init__(self, loader: Loader, prefix: str, count: int) -> None:
        self.loader = loader
        self.prefix = prefix
        self.count = count

    def mixture(self, routing: Routing, clamp: Clamp | None, hidden: int, intermediate: int) -> MixtureOp:
        """Read all experts, and return the operator that computes them.

        Each rank has a part of every expert, and the result has the outputs of all ranks.

        Args:
            routing: rule that selects the experts of each row and their weights.
            clamp: parameters of the clamped activation; None for SiLU.
        """
        loader, down = self.loader, self._down_key()
        inputs = loader.input_shares(down, intermediate)
        if loader.sums(down, inputs):
            experts = self._experts(inputs, RowRange(0, hidden, hidden), inputs.own)
            experts = [replace(expert, down_bias=loader.added_once(expert.down_bias)) for expert in experts]
            return loader.summed(loader.mixture(experts, routing, clamp, None), hidden)
        outputs = loader.shares(hidden)
        shares = ExpertShares(inputs, outputs) if loader.ranks > 1 else None
        return loader.mixture(self._experts(inputs, outputs.own), routing, clamp, shares)

    def matrix(
        self, name: str, shape: tuple[int, int], expert: int, ranges: Sequence[RowRange], columns: RowRange | None
    ) -> Any:
        """Return a part of one expert's matrix from the tensor `name`, which stacks the matrices of all experts.

        Args:
            shape: shape of one expert's matrix.
            expert: index of the expert.
            ranges: ranges of the rows to return.
            columns: range of the columns to return; None for all columns.
        """
        return self.loader.matrix(name, (self.count, *shape), expert, ranges, columns)

    def biases(self, name: str, width: int) -> Tensor:
        """Return the tensor `name` of the biases of all E experts, float32 [E, width]."""
        return self.loader.plain(name, (self.count, width))

    def _down_key(self) -> str:
        """Return the name of the first expert's down matrix, with the suffix `#0` if it is part of a stack."""
        single = f"{self.prefix}.0.down_proj.weight"
        stacks = (f"{self.prefix}.down_proj", f"{self.prefix}.down_proj.weight")
        return next((f"{name}#0" for name in stacks if name in self.loader), single)

    def _experts(self, inputs: Shares, rows: RowRange, columns: RowRange | None = None) -> list[Expert]:
        """Return all experts in order.

        Args:
            inputs: division of the inputs of down, which are the outputs of gate and of up.
            rows, columns: rows and columns of down; None for all columns.
        """
        own, hidden, intermediate = inputs.own, rows.total, inputs.total
        if f"{self.prefix}.gate_up_proj" in self.loader:
            both = (own.times(1, 0, 2 * intermediate), own.times(1, intermediate, 2 * intermediate))
            gate_ups = self._matrices({"gate_up_proj": both}, hidden)
        else:
            gate_ups = self._matrices({"gate_proj": (own,), "up_proj": (own,)}, hidden)
        downs = self._matrices({"down_proj": (rows,)}, intermediate, columns)
        return [
            Expert(gate_up, down, gate_up_bias, down_bias)
            for (gate_up, gate_up_bias), ((down,), down_bias) in zip(gate_ups, downs, strict=True)
        ]

    def _matrices(
        self, outputs: Mapping[str, Sequence[RowRange]], inputs: int, columns: RowRange | None = None
    ) -> list[tuple[list[Any], Tensor | None]]:
        """Return for each expert a list of matrices, and the concatenated biases of these matrices or None.

        Args:
            outputs: for each matrix, the name without the prefix, such as `gate_proj`, and the ranges of the rows to
                return.
            inputs: number of columns of each matrix.
            columns: the columns of this rank; None for all columns.
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
        weight, bias = ("", "_bias") if f"{prefix}.{first_name}" in loader else (".weight", ".bias")
        biases: list[Any] = [None] * self.count
        if any(f"{prefix}.{name}{bias}" in loader for name in outputs):
            stacked_biases = [
                self.biases(f"{prefix}.{name}{bias}", ranges[0].total)[:, row_numbers(ranges)]
                for name, ranges in outputs.items()
            ]
            biases = list(torch.cat(stacked_biases, dim=1))
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
