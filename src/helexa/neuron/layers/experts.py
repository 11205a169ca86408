"""Reader of the expert weights of a mixture of experts, for all supported checkpoint layouts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from helexa.neuron.layers.loader import Loader
from helexa.neuron.ops.mixture import Expert


class ExpertReader:
    """Reads the matrices of E experts, which a checkpoint stores separately or stacked in one tensor.

    I is the intermediate size and H the hidden size. The layouts are, each with optional biases:

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

    def experts(self, hidden: int, intermediate: int) -> list[Expert]:
        """Return the weights of all experts in the order of their numbers."""
        fused = f"{self.prefix}.gate_up_proj" in self.loader
        gates = {"gate_up_proj": 2 * intermediate} if fused else {"gate_proj": intermediate, "up_proj": intermediate}
        gate_ups = self._matrices(gates, hidden)
        downs = self._matrices({"down_proj": hidden}, intermediate)
        return [
            Expert(gate_up, down, gate_up_bias, down_bias)
            for (gate_up, gate_up_bias), ((down,), down_bias) in zip(gate_ups, downs, strict=True)
        ]

    def matrix(self, name: str, shape: tuple[int, int], expert: int) -> Any:
        """Return the matrix of one expert from the stacked tensor `name`, prepared for the kernels.

        Args:
            shape: shape of the expert's matrix, [outputs, inputs].
        """
        return self.loader.matrix(name, (self.count, *shape), expert)

    def biases(self, name: str, width: int) -> Tensor:
        """Return the stacked biases `name` of all experts, float32 [E, width]."""
        return self.loader.plain(name, (self.count, width))

    def _matrices(self, outputs: Mapping[str, int], inputs: int) -> list[tuple[list[Any], Tensor | None]]:
        """Return for each expert a list of matrices, and the concatenated biases of these matrices or None.

        Args:
            outputs: name of each matrix without the prefix, such as `gate_proj`, and its number of outputs.
            inputs: number of inputs of each matrix.
        """
        loader, prefix, experts = self.loader, self.prefix, range(self.count)
        first_name = next(iter(outputs))
        if f"{prefix}.0.{first_name}.weight" in loader:
            return [
                loader.matrices({f"{prefix}.{expert}.{name}": width for name, width in outputs.items()}, inputs)
                for expert in experts
            ]
        weight, bias = ("", "_bias") if f"{prefix}.{first_name}" in loader else (".weight", ".bias")
        biases: list[Any] = [None] * self.count
        if any(f"{prefix}.{name}{bias}" in loader for name in outputs):
            stacked_biases = [self.biases(f"{prefix}.{name}{bias}", width) for name, width in outputs.items()]
            biases = list(torch.cat(stacked_biases, dim=1))
        shapes = {f"{prefix}.{name}{weight}": (width, inputs) for name, width in outputs.items()}
        return [
            ([self.matrix(name, shape, expert) for name, shape in shapes.items()], biases[expert]) for expert in experts
        ]
