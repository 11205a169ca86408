"""Gated feed-forward layers of which each row passes a few."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from helexa.neuron.layers.loader import Loader
from helexa.neuron.ops.linear import LinearOp


class Experts:
    """The experts of one layer; only those that somebody chose are run.

    They are read from whichever form the checkpoint has: matrices of their own (`prefix.7.gate_proj.weight`), all
    gates with all ups in one tensor (`prefix.gate_up_proj`, [E, 2 * I, H]), or one tensor for each of the three
    (`prefix.gate_proj.weight`, [E, I, H], as in GGUF files). Biases may be there.

    Args:
        count: E.
        chosen: of them for each row.
    """

    def __init__(self, loader: Loader, prefix: str, *, hidden: int, intermediate: int, count: int, chosen: int) -> None:
        self.loader = loader
        self.count = count
        fused = f"{prefix}.gate_up_proj" in loader
        gates = {"gate_up_proj": 2 * intermediate} if fused else {"gate_proj": intermediate, "up_proj": intermediate}
        before = loader.ops.step_bytes
        self._gate_ups = self._linears(prefix, gates, hidden)
        self._downs = self._linears(prefix, {"down_proj": hidden}, intermediate, "silu")
        # Of what `linear` counted, a decode step reads the part of those that are chosen.
        loader.ops.step_bytes = before + (loader.ops.step_bytes - before) * chosen // count

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of what each row's experts make of it, added up in ascending order of experts.

        So a row's result does not depend on the rows beside it.

        Args:
            x: [T, H].
            chosen: int64 [T, K], the experts of each row, no expert twice.
            weights: [T, K].

        Returns:
            [T, H].
        """
        out = torch.zeros_like(x)
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)  # by expert, then by row
        rows, scales = order // chosen.shape[1], weights.to(x.dtype).flatten()[order, None]
        start = 0
        for expert, count in enumerate(pairs.bincount().tolist()):
            if count:
                these = slice(start, start + count)
                gate_up = self.before_gate(self._gate_ups[expert](x[rows[these]]))
                out.index_add_(0, rows[these], self._downs[expert](gate_up) * scales[these])
                start += count
        return out

    def before_gate(self, gate_up: Tensor) -> Tensor:
        """What happens to [T, 2 * I] before `silu(gate) * up`; may be in place."""
        return gate_up

    def matrix(self, name: str, shape: tuple[int, int], expert: int) -> Any:
        """The matrix of one expert in a tensor of those of all."""
        return self.loader.matrix(name, (self.count, *shape), expert)

    def biases(self, name: str, width: int) -> Tensor:
        """Those of all experts, [E, width]."""
        return self.loader.plain(name, (self.count, width))

    def _linears(self, prefix: str, outputs: Mapping[str, int], inputs: int, gate: str | None = None) -> list[LinearOp]:
        """For each expert the product of `outputs`, side by side (see `Loader.linear`)."""
        loader, experts = self.loader, range(self.count)
        first = next(iter(outputs))
        if f"{prefix}.0.{first}.weight" in loader:
            parts = [{f"{prefix}.{expert}.{name}": width for name, width in outputs.items()} for expert in experts]
            return [loader.linear(part, inputs, gate) for part in parts]
        weight, bias = ("", "_bias") if f"{prefix}.{first}" in loader else (".weight", ".bias")
        biases: list[Any] = [None] * self.count
        if any(f"{prefix}.{name}{bias}" in loader for name in outputs):
            found = [self.biases(f"{prefix}.{name}{bias}", width) for name, width in outputs.items()]
            biases = list(torch.cat(found, dim=1))
        return [
            loader.ops.linear(
                [self.matrix(f"{prefix}.{name}{weight}", (width, inputs), expert) for name, width in outputs.items()],
                biases[expert],
                gate,
            )
            for expert in experts
        ]
