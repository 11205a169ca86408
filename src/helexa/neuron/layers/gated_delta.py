"""Gated DeltaNet: attention with a fixed-size recurrent state, no KV cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.neuron.layers.block import Step
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.short_convolution import require_window
from helexa.neuron.ops.gated_delta import DeltaSizes, DeltaWeights, wide
from helexa.neuron.ops.rank_group_and_shares import RowRange, row_numbers
from helexa.neuron.ops.state_cache import MatrixCache
from helexa.neuron.tensors import Tensor
from helexa.neuron.weights.model_file import Part

_LARGEST_STATE = 1 << 26  # bytes per sequence and layer; real models use a few MiB


class GatedDeltaNet:
    """Linear attention by the gated delta rule (Yang et al., 2024).

    The class implements `Mixer`. A short convolution over `kernel` tokens comes first. With tensor parallelism, each
    rank computes some of the key heads and the value heads that share these key heads (see `DeltaSizes`).
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
            raise ModelFileError(
                f"{heads} value heads cannot share {key_heads} key heads of linear attention, because {heads} is not a "
                f"multiple of {key_heads}"
            )
        require_window(kernel)
        shares = loader.head_shares(heads, key_heads)
        values, keys = shares.queries.own, shares.kv_heads
        sizes = DeltaSizes(len(keys), len(values), key_dim, value_dim, kernel)
        ops, heads_per_key = loader.ops, heads // key_heads
        self.state_bytes = ops.state_bytes(sizes)
        if self.state_bytes > _LARGEST_STATE:
            raise UnsupportedModelError(
                f"linear attention with {heads} heads of {key_dim} x {value_dim} numbers needs a recurrent state of "
                f"{self.state_bytes} bytes; the limit is {_LARGEST_STATE} bytes"
            )
        # number of rows of the queries, keys and values of all ranks
        mixed_width = 2 * key_heads * key_dim + heads * value_dim
        mixed = (
            keys.times(key_dim, 0, mixed_width),
            keys.times(key_dim, key_heads * key_dim, mixed_width),
            values.times(value_dim, 2 * key_heads * key_dim, mixed_width),
        )
        # Qwen3-Next joins queries, keys, values and z in one tensor, grouped by key head. Qwen3.5 has separate tensors.
        if f"{prefix}.in_proj_qkvz.weight" in loader:
            widths = (key_dim, key_dim, heads_per_key * value_dim, heads_per_key * value_dim)
            ranges = (*mixed, values.times(value_dim, mixed_width, mixed_width + heads * value_dim))
            ranges = tuple(RowRange(rows.start, rows.stop, ranges[-1].total) for rows in ranges)
            matrices = [_ungrouped(loader, f"{prefix}.in_proj_qkvz.weight", hidden, key_heads, widths, ranges)]
        else:
            matrices = [
                loader.matrix(f"{prefix}.in_proj_qkv.weight", (mixed_width, hidden), ranges=mixed),
                loader.matrix(
                    f"{prefix}.in_proj_z.weight", (heads * value_dim, hidden), ranges=(values.times(value_dim),)
                ),
            ]
        if f"{prefix}.in_proj_ba.weight" in loader:
            widths = (heads_per_key, heads_per_key)
            ranges = (values.times(1, 0, 2 * heads), values.times(1, heads, 2 * heads))
            matrices += [_ungrouped(loader, f"{prefix}.in_proj_ba.weight", hidden, key_heads, widths, ranges)]
        else:
            matrices += [
                loader.matrix(f"{prefix}.in_proj_{name}.weight", (heads, hidden), ranges=(values,)) for name in "ba"
            ]
        self._in = loader.product(matrices, None)
        self._widths = (sizes.mixed, sizes.values, len(values), len(values))
        weights = DeltaWeights(
            kernel=loader.plain(f"{prefix}.conv1d.weight", (mixed_width, 1, kernel), mixed)[:, 0].T.contiguous(),
            rate=wide(loader.vector(f"{prefix}.A_log", heads, (values,)), ops.device).exp().float(),
            bias=loader.vector(f"{prefix}.dt_bias", heads, (values,)),
            norm=loader.vector(f"{prefix}.norm.weight", value_dim),
            eps=eps,
        )
        self._rule = ops.delta_rule(sizes, weights)
        self._out = loader.row_parallel_linear(f"{prefix}.out_proj", hidden, shares.queries.times(value_dim))

    def new_cache(self, pages: int, slots: int) -> MatrixCache:
        """Return a cache of `slots` recurrent states; `pages` has no effect."""
        return self._rule.new_cache(slots)

    def __call__(self, x: Tensor, cache: MatrixCache, step: Step, rows: Tensor | None = None) -> Tensor:
        """Update the recurrent states in `cache`, and return the outputs (see `Mixer`)."""
        mixed, z, b, a = self._in(x).split(self._widths, dim=-1)
        return self._out(self._rule(mixed, z, b, a, cache, step.batch, rows))


def _ungrouped(
    loader: Loader,
    name: str,
    inputs: int,
    key_heads: int,
    widths: tuple[int, ...],
    ranges: Sequence[RowRange],
) -> Any:
    """Return a rank's rows of a matrix of several projections, sorted by projection.

    Args:
        widths: number of rows of each projection in the group of one key head.
        ranges: rows of this rank among the sorted rows.
    """
    shape = (key_heads * sum(widths), inputs)
    # In the checkpoint, the rows are grouped by key head instead.
    grouped = np.split(np.arange(shape[0]).reshape(key_heads, -1), np.cumsum(widths)[:-1], axis=1)
    rows = np.concatenate([numbers.ravel() for numbers in grouped])[row_numbers(ranges)]
    return loader.prepared(name, shape, lambda: loader.weight(name, shape, part=Part(rows)), ranges)
