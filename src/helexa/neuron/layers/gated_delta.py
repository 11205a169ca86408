"""Gated DeltaNet: a layer that stores a recurrent state of fixed size per sequence instead of a KV cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.step import Step
from helexa.neuron.ops.delta.delta_cache import DeltaCache
from helexa.neuron.ops.delta.delta_rule import DeltaSizes, DeltaWeights
from helexa.neuron.ops.ranks.shares import RowRange, row_numbers
from helexa.neuron.weights.part import Part

_LARGEST_STATE = 1 << 26  # bytes per sequence and layer; real models use a few MiB


class GatedDeltaNet:
    """Linear attention by the gated delta rule (Yang et al., 2024) after a short convolution over tokens.

    The class implements `Mixer`, the sublayer of a decoder layer that mixes positions. With tensor parallelism, each
    rank computes some of the key heads and the value heads that share these key heads.

    A checkpoint has either four input projections (`in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`) or two
    (`in_proj_qkvz`, `in_proj_ba`). In a checkpoint with two projections, the rows of a projection are grouped by key
    head.

    Args:
        key_heads: number of query heads, and of key heads.
        heads: number of value heads. `heads / key_heads` value heads share one key head.
        key_dim: width of a query or key head.
        value_dim: width of a value head.
        kernel: number of tokens in the convolution's window.
        eps: epsilon of the norm on each value head's output.
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
        shares = loader.head_shares(heads, key_heads)
        values, keys = shares.queries.own, shares.kv_heads
        sizes = DeltaSizes(len(keys), len(values), key_dim, value_dim, kernel)
        ops, heads_per_key = loader.ops, heads // key_heads
        self.state_bytes = ops.state_bytes(sizes)
        if self.state_bytes > _LARGEST_STATE:
            raise ModelFileError(f"{heads} heads of {key_dim} by {value_dim} make a state of {self.state_bytes} bytes")
        mixed_width = 2 * key_heads * key_dim + heads * value_dim  # rows of the queries, keys and values of all ranks
        mixed = (
            keys.times(key_dim, 0, mixed_width),
            keys.times(key_dim, key_heads * key_dim, mixed_width),
            values.times(value_dim, 2 * key_heads * key_dim, mixed_width),
        )
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
            rate=loader.vector(f"{prefix}.A_log", heads, (values,)).exp(),
            bias=loader.vector(f"{prefix}.dt_bias", heads, (values,)),
            norm=loader.vector(f"{prefix}.norm.weight", value_dim),
            eps=eps,
        )
        self._rule = ops.delta_rule(sizes, weights)
        self._out = loader.reduced_linear(f"{prefix}.out_proj", hidden, shares.queries.times(value_dim))

    def new_cache(self, pages: int, slots: int) -> DeltaCache:
        """Return a cache with `slots` state slots, each for one recurrent state. The layer has no KV `pages`."""
        return self._rule.new_cache(slots)

    def __call__(self, x: Tensor, cache: DeltaCache, step: Step, rows: Tensor | None = None) -> Tensor:
        """Update the recurrent states in `cache`, and return the layer's output.

        Accepted tokens change the recurrent state of their sequence. Draft tokens of speculative decoding do not
        (see `Span.settled`).

        Args:
            x: [T, H], inputs of the layer: T rows (tokens of the batch), H the hidden size.
            cache: recurrent states of this layer, from `new_cache`.
            step: the batch.
            rows: int32 [S], indexes of the rows to return; None for all rows.

        Returns:
            [T, H], or [S, H] if `rows` is given.
        """
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
    """Read the matrix of several projections with its rows sorted by projection, and return the rows `ranges`.

    In the checkpoint, the rows of the matrix are grouped by key head instead. The group of a key head contains rows of
    each projection.

    Args:
        name: name of the matrix in the checkpoint.
        inputs: number of columns of the matrix.
        widths: number of rows of each projection in the group of one key head.
        ranges: ranges of the sorted rows.
    """
    shape = (key_heads * sum(widths), inputs)
    grouped = np.split(np.arange(shape[0]).reshape(key_heads, -1), np.cumsum(widths)[:-1], axis=1)
    rows = np.concatenate([numbers.ravel() for numbers in grouped])[row_numbers(ranges)]
    return loader.prepared(name, shape, lambda: loader.weight(name, shape, part=Part(rows)), ranges)
