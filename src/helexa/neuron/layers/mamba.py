"""Mamba-2: a state space with a decay per head and token, no KV cache."""

import math

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.neuron.layers.block import Step
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.short_convolution import conv_weights, require_window
from helexa.neuron.ops.gated_delta import wide
from helexa.neuron.ops.rank_group_and_shares import RowRange
from helexa.neuron.ops.state_cache import MatrixCache
from helexa.neuron.ops.state_space import ScanSizes, ScanWeights
from helexa.neuron.tensors import Tensor

# Values of the setting `time_step_limit` that do not limit the step sizes. None stands for a missing setting.
UNLIMITED_STEPS = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])

_LARGEST_STATE = 1 << 26  # bytes per sequence and layer; real models use a few MiB


class Mamba2:
    """Selective state space layer (Dao and Gu, 2024).

    The class implements `Mixer`. A short convolution over tokens comes before the scan, and a gate and a norm after the
    scan. With tensor parallelism, each rank computes some of the heads and the groups that these heads share.

    Args:
        sizes: sizes of the layer on all ranks together.
    """

    page_bytes = 0

    def __init__(self, loader: Loader, prefix: str, *, hidden: int, sizes: ScanSizes, eps: float) -> None:
        _check(sizes)
        ops, shares = loader.ops, loader.head_shares(sizes.heads, sizes.groups)
        heads, groups = shares.queries.own, shares.kv_heads
        own = ScanSizes(len(heads), len(groups), sizes.head_dim, sizes.state_dim, sizes.kernel)
        self.state_bytes = ops.state_bytes(own)
        mixed = _mixed_rows(sizes, heads, groups, 0, sizes.mixed)
        total = sizes.values + sizes.mixed + sizes.heads
        rows = (
            heads.times(sizes.head_dim, 0, total),
            *_mixed_rows(sizes, heads, groups, sizes.values, total),
            heads.times(1, sizes.values + sizes.mixed, total),
        )
        self._in = loader.product(*loader.matrices({f"{prefix}.in_proj": rows}, hidden))
        self._widths = (own.values, own.mixed, own.heads)
        weights = ScanWeights(
            convolution=conv_weights(loader, f"{prefix}.conv1d", sizes.mixed, sizes.kernel, mixed),
            rate=wide(loader.vector(f"{prefix}.A_log", sizes.heads, (heads,)), ops.device).exp().float(),
            bias=loader.vector(f"{prefix}.dt_bias", sizes.heads, (heads,)),
            skip=loader.vector(f"{prefix}.D", sizes.heads, (heads,)),
        )
        self._scan = ops.scan(own, weights)
        values, width = shares.queries.times(sizes.head_dim), sizes.values // sizes.groups
        self._gathered = None
        # The outputs of the heads of a group are normalized together, so a rank with whole groups needs no other
        # outputs.
        if all(one.start % width == one.stop % width == 0 for one in values.ranges):
            norm = loader.vector(f"{prefix}.norm.weight", sizes.values, (values.own,))
            self._norm = ops.group_norm(norm, len(values.own) // width, eps)
            self._out = loader.row_parallel_linear(f"{prefix}.out_proj", hidden, values)
        else:  # the ranks divide a group, so each rank gathers and normalizes the outputs of all ranks
            self._gathered = values
            self._norm = ops.group_norm(loader.vector(f"{prefix}.norm.weight", sizes.values), sizes.groups, eps)
            outputs = loader.shares(hidden)
            product = loader.column_parallel_linear({f"{prefix}.out_proj": outputs.own}, sizes.values)
            self._out = loader.gather_outputs(product, outputs)
        self._ops = ops

    def new_cache(self, pages: int, slots: int) -> MatrixCache:
        """Return a cache of `slots` recurrent states; `pages` has no effect."""
        return self._scan.new_cache(slots)

    def __call__(self, x: Tensor, cache: MatrixCache, step: Step, rows: Tensor | None = None) -> Tensor:
        """Update the recurrent states in `cache`, and return the outputs (see `Mixer`)."""
        z, mixed, steps = self._in(x).split(self._widths, dim=-1)
        out = self._scan(z, mixed, steps, cache, step.batch, rows)
        if self._gathered is not None:
            out = self._ops.gather(out, self._gathered)
        return self._out(self._norm(out))


def _mixed_rows(
    sizes: ScanSizes, heads: RowRange, groups: RowRange, start: int, total: int
) -> tuple[RowRange, RowRange, RowRange]:
    """Return the rows of a matrix that yield a rank's inputs, keys and queries.

    Args:
        heads: heads of the rank.
        groups: groups of keys and queries of the rank.
        start: index of the first row of all inputs; the rows of all keys and of all queries follow.
        total: number of rows of the matrix.
    """
    keys = start + sizes.values
    return (
        heads.times(sizes.head_dim, start, total),
        groups.times(sizes.state_dim, keys, total),
        groups.times(sizes.state_dim, keys + sizes.keys, total),
    )


def _check(sizes: ScanSizes) -> None:
    """Raise a ModelFileError (or a subclass) if a layer cannot have these sizes."""
    if sizes.heads % sizes.groups:
        raise ModelFileError(
            f"{sizes.heads} Mamba-2 heads cannot share {sizes.groups} groups of keys and queries, because "
            f"{sizes.heads} is not a multiple of {sizes.groups}"
        )
    require_window(sizes.kernel)
    if sizes.state_bytes > _LARGEST_STATE:
        raise UnsupportedModelError(
            f"Mamba-2 with {sizes.heads} heads of {sizes.state_dim} x {sizes.head_dim} numbers needs a recurrent state "
            f"of {sizes.state_bytes} bytes; the limit is {_LARGEST_STATE} bytes"
        )
