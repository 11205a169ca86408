"""The experts of a mixture, from whichever form a checkpoint has them in."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from helexa.neuron.layers.loader import Loader
from helexa.neuron.ops.mixture import Expert


class ExpertReader:
    """Finds matrices of each expert alone, or those of all in one tensor.

    That is `prefix.7.gate_proj.weight`; `prefix.gate_up_proj`, [E, 2 * I, H], gates first, and `prefix.down_proj`; or
    `prefix.gate_proj.weight`, [E, I, H], and so on, as in GGUF files. Biases may be there.

    Args:
        count: E.
    """

    def __init__(self, loader: Loader, prefix: str, count: int) -> None:
        self.loader = loader
        self.prefix = prefix
        self.count = count

    def experts(self, hidden: int, intermediate: int) -> list[Expert]:
        """All of them, in order."""
        fused = f"{self.prefix}.gate_up_proj" in self.loader
        gates = {"gate_up_proj": 2 * intermediate} if fused else {"gate_proj": intermediate, "up_proj": intermediate}
        gate_ups = self._parts(gates, hidden)
        downs = self._parts({"down_proj": hidden}, intermediate)
        return [
            Expert(gate_up, down, gate_up_bias, down_bias)
            for (gate_up, gate_up_bias), ((down,), down_bias) in zip(gate_ups, downs, strict=True)
        ]

    def matrix(self, name: str, shape: tuple[int, int], expert: int) -> Any:
        """That of one expert in a tensor of those of all."""
        return self.loader.matrix(name, (self.count, *shape), expert)

    def biases(self, name: str, width: int) -> Tensor:
        """Those of all experts, [E, width]."""
        return self.loader.plain(name, (self.count, width))

    def _parts(self, outputs: Mapping[str, int], inputs: int) -> list[tuple[list[Any], Tensor | None]]:
        """For each expert the matrices that make `outputs` side by side, and their biases."""
        loader, prefix, experts = self.loader, self.prefix, range(self.count)
        first = next(iter(outputs))
        if f"{prefix}.0.{first}.weight" in loader:
            return [
                loader.parts({f"{prefix}.{expert}.{name}": width for name, width in outputs.items()}, inputs)
                for expert in experts
            ]
        weight, bias = ("", "_bias") if f"{prefix}.{first}" in loader else (".weight", ".bias")
        biases: list[Any] = [None] * self.count
        if any(f"{prefix}.{name}{bias}" in loader for name in outputs):
            found = [self.biases(f"{prefix}.{name}{bias}", width) for name, width in outputs.items()]
            biases = list(torch.cat(found, dim=1))
        shapes = {f"{prefix}.{name}{weight}": (width, inputs) for name, width in outputs.items()}
        return [
            ([self.matrix(name, shape, expert) for name, shape in shapes.items()], biases[expert]) for expert in experts
        ]
