"""Gated DeltaNet: a layer that stores a recurrent state of fixed size per sequence instead of a KV cache."""

from typing import Any

import torch
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.step import Step
from helexa.neuron.ops.delta.delta_cache import DeltaCache
from helexa.neuron.ops.delta.delta_rule import DeltaSizes, DeltaWeights
from helexa.neuron.weights.formats import GroupwiseTensor, Weight

_LARGEST_STATE = 1 << 26  # bytes per sequence and layer; the largest models have 3 MiB


class GatedDeltaNet:
    """Linear attention by the gated delta rule (Yang et al., 2024) after a short convolution; implements `Mixer`.

    The checkpoint has four input projections (`in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`) or two
    (`in_proj_qkvz`, `in_proj_ba`). The two-projection layout groups rows by key head: the rows of the first key head
    and of the value heads that share it come first.

    Args:
        key_heads: Hk, the number of query heads, and of key heads.
        heads: Hv, the number of value heads. Hv / Hk consecutive value heads share one key head.
        key_dim: Dk, width of a query or key head.
        value_dim: Dv, width of a value head.
        kernel: K, the number of tokens that the convolution covers.
        eps: epsilon of the norm on each head's output.
    """

    page_bytes = 0

    def __init__(
        self,
        loader: Loader,
        prefix: str,
        *,
        hidden: int,
        key_heads: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        eps: float,
    ) -> None:
        if heads % key_heads:
            raise ModelFileError(f"{heads} value heads cannot share {key_heads} key heads")
        sizes = DeltaSizes(key_heads, heads, key_dim, value_dim, kernel)
        ops, heads_per_key = loader.ops, heads // key_heads
        self.state_bytes = ops.state_bytes(sizes)
        if self.state_bytes > _LARGEST_STATE:
            raise ModelFileError(f"{heads} heads of {key_dim} by {value_dim} make a state of {self.state_bytes} bytes")
        if f"{prefix}.in_proj_qkvz.weight" in loader:
            widths = (key_dim, key_dim, heads_per_key * value_dim, heads_per_key * value_dim)
            matrices = [_ungrouped(loader, f"{prefix}.in_proj_qkvz.weight", hidden, key_heads, widths)]
        else:
            row_counts = {"in_proj_qkv": sizes.mixed, "in_proj_z": sizes.values}
            matrices = [loader.matrix(f"{prefix}.{name}.weight", (rows, hidden)) for name, rows in row_counts.items()]
        if f"{prefix}.in_proj_ba.weight" in loader:
            matrices += [
                _ungrouped(loader, f"{prefix}.in_proj_ba.weight", hidden, key_heads, (heads_per_key, heads_per_key))
            ]
        else:
            matrices += [loader.matrix(f"{prefix}.in_proj_{name}.weight", (heads, hidden)) for name in "ba"]
        self._in = loader.product(matrices, None)
        self._widths = (sizes.mixed, sizes.values, heads, heads)
        weights = DeltaWeights(
            kernel=loader.plain(f"{prefix}.conv1d.weight", (sizes.mixed, 1, kernel))[:, 0].T.contiguous(),
            rate=loader.vector(f"{prefix}.A_log", heads).exp(),
            bias=loader.vector(f"{prefix}.dt_bias", heads),
            norm=loader.vector(f"{prefix}.norm.weight", value_dim),
            eps=eps,
        )
        self._rule = ops.delta_rule(sizes, weights)
        self._out = loader.linear({f"{prefix}.out_proj": hidden}, sizes.values)

    def new_cache(self, pages: int, slots: int) -> DeltaCache:
        """Return a cache with `slots` state slots; `pages` is ignored."""
        return self._rule.new_cache(slots)

    def __call__(self, x: Tensor, cache: DeltaCache, step: Step, rows: Tensor | None = None) -> Tensor:
        """Update the recurrent states in `cache`, and return the layer's output.

        Only accepted tokens change a state; draft tokens do not (see `Span.settled`).

        Args:
            x: [T, H], inputs of the layer: T rows (tokens of the batch), H the hidden size.
            rows: int32 [S], indexes of the rows to return; None for all rows.

        Returns:
            [T, H], or [S, H] if `rows` is given.
        """
        mixed, z, b, a = self._in(x).split(self._widths, dim=-1)
        return self._out(self._rule(mixed, z, b, a, cache, step.batch, rows))


def _ungrouped(loader: Loader, name: str, inputs: int, key_heads: int, widths: tuple[int, ...]) -> Any:
    """Return a fused matrix with all rows of its first projection first, then all rows of the second, and so on.

    The checkpoint's tensor `name` instead lists the rows of all projections for the first key head, then for the next.

    Args:
        inputs: number of columns of the matrix.
        widths: number of rows of each projection per key head.
    """
    shape = (key_heads * sum(widths), inputs)

    def read() -> Weight:
        weight = loader.weight(name, shape)
        row_indexes = torch.arange(shape[0]).view(key_heads, -1).split(widths, dim=1)
        order = torch.cat([indexes.flatten() for indexes in row_indexes])
        return weight.rows(order) if isinstance(weight, GroupwiseTensor) else weight[order]

    return loader.prepared(name, shape, read)
