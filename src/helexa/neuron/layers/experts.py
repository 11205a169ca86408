"""Gated feed-forward layers of which each row passes a few."""

import torch
from torch import Tensor

from helexa.neuron.layers.loader import Loader
from helexa.neuron.ops.linear import LinearOp


class Experts:
    """The experts of one layer; only those that somebody chose are run.

    They are read from whichever form the checkpoint has: matrices of their own (`prefix.7.gate_proj.weight`), all
    gates with all ups in one tensor (`prefix.gate_up_proj`, [E, 2 * I, H]), or one tensor for each of the three
    (`prefix.gate_proj.weight`, [E, I, H], as in GGUF files).

    Args:
        count: E.
        chosen: of them for each row.
        act: see `GatedMlp`.
    """

    def __init__(
        self,
        loader: Loader,
        prefix: str,
        *,
        hidden: int,
        intermediate: int,
        count: int,
        chosen: int,
        act: str = "silu",
    ) -> None:
        self._loader, self._prefix = loader, prefix
        self._hidden, self._intermediate, self._count = hidden, intermediate, count
        before = loader.ops.step_bytes
        self._experts = [(self._gate_up(expert), self._down(expert, act)) for expert in range(count)]
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
        counts = pairs.bincount(minlength=self._count).tolist()
        for (gate_up, down), count in zip(self._experts, counts, strict=True):
            if count:
                these = slice(start, start + count)
                found = down(gate_up(x[rows[these]]))
                out.index_add_(0, rows[these], found * scales[these])
                start += count
        return out

    def _gate_up(self, expert: int) -> LinearOp:
        loader, prefix, wide, hidden = self._loader, self._prefix, self._intermediate, self._hidden
        fused, names = f"{prefix}.gate_up_proj", (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
        if fused in loader:
            return loader.ops.linear([loader.matrix(fused, (self._count, 2 * wide, hidden), expert)], None)
        if names[0] in loader:
            return loader.ops.linear([loader.matrix(name, (self._count, wide, hidden), expert) for name in names], None)
        return loader.linear({f"{prefix}.{expert}.{name}": wide for name in ("gate_proj", "up_proj")}, hidden)

    def _down(self, expert: int, act: str) -> LinearOp:
        loader, prefix, wide, hidden = self._loader, self._prefix, self._intermediate, self._hidden
        for name in (f"{prefix}.down_proj", f"{prefix}.down_proj.weight"):
            if name in loader:
                return loader.ops.linear([loader.matrix(name, (self._count, hidden, wide), expert)], None, act)
        return loader.linear({f"{prefix}.{expert}.down_proj": hidden}, wide, act)
