"""Gated DeltaNet layers on native kernels."""

from collections.abc import Callable

import torch
from torch import Tensor

from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.constants import LANES, MAX_DIM
from helexa.neuron.ops.delta.delta_cache import DeltaCache
from helexa.neuron.ops.delta.delta_rule import DeltaSizes, DeltaWeights
from helexa.neuron.ops.native.launcher import Launcher


class SpanList:
    """The spans (rows of each sequence) of the current batch, for native kernels.

    The tensors have fixed addresses, because captured graphs contain these addresses.

    Attributes:
        count: int64 [1], number of spans of the current batch.
        spans: int64 [.., 5], one struct `span` of kernels.h per line; only the first `count` lines are used.
    """

    def __init__(self) -> None:
        self.count = torch.zeros(1, dtype=torch.int64)
        self.spans = torch.zeros(0, 5, dtype=torch.int64)

    def lay(self, batch: Batch) -> None:
        """Replace the contents of both tensors with the spans of `batch`. All batches have the same `capacity`."""
        spans = batch.span_list
        if not len(self.spans):
            self.spans = torch.zeros(batch.capacity.sequences, 5, dtype=torch.int64)
        self.count.numpy()[0] = len(spans)
        self.spans.numpy()[: len(spans)] = [
            (span.start, span.stop - span.start, span.settled, span.slot, span.prefix == 0) for span in spans
        ]


class NativeDelta:
    """Operator of a Gated DeltaNet layer on native kernels; implements `DeltaOp`.

    The kernels compute the tokens of a sequence one after another. The states of a few columns stay in the processor
    cache meanwhile, so this takes fewer operations than chunks of tokens.

    Args:
        spans: the spans of the current batch.
        register: function that `new_cache` calls with each new cache.
    """

    def __init__(
        self,
        launcher: Launcher,
        sizes: DeltaSizes,
        weights: DeltaWeights,
        spans: SpanList,
        register: Callable[[DeltaCache], None],
    ) -> None:
        self._launcher = launcher
        self._sizes = sizes
        self._kernel = weights.kernel.float().contiguous()
        self._rate, self._bias, self._norm = (
            x.float().contiguous() for x in (weights.rate, weights.bias, weights.norm)
        )
        self._eps = weights.eps
        self._spans = spans
        self._register = register

    @staticmethod
    def fits(sizes: DeltaSizes) -> bool:
        """Return whether the kernels support heads of these sizes."""
        return sizes.key_dim % LANES == 0 and sizes.value_dim % LANES == 0 and sizes.key_dim <= MAX_DIM

    def new_cache(self, slots: int) -> DeltaCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        cache = DeltaCache(*(torch.empty(slots, *shape) for shape in self._sizes.state_shapes))
        self._register(cache)
        return cache

    def __call__(
        self, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, cache: DeltaCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        """Apply the layer to the T rows of one step, and update the recurrent states in `cache` (see `DeltaOp`).

        Returns:
            float32 [S, Hv * Dv] for the S rows with the indexes `rows`, or [T, Hv * Dv] if `rows` is None.
        """
        launcher, sizes, count = self._launcher, self._sizes, mixed.shape[0]
        heads, key_heads, stride = sizes.heads, sizes.key_heads, mixed.stride(0)
        assert stride == z.stride(0) == b.stride(0) == a.stride(0), "not the columns of one tensor"
        spans = {"span_count": self._spans.count, "spans": self._spans.spans}
        qkv = launcher.take(count, sizes.mixed)
        launcher.launch(
            "convolve",
            x=mixed,
            weights=self._kernel,
            state=cache.conv,
            out=qkv,
            width=sizes.mixed,
            stride=stride,
            taps=sizes.kernel,
            **spans,
        )
        factors = launcher.take(count, 2 * heads + 2 * key_heads)
        launcher.launch(
            "delta_factors",
            qkv=qkv,
            decay=a,
            beta=b,
            rate=self._rate,
            bias=self._bias,
            factors=factors,
            rows=count,
            width=sizes.mixed,
            stride=stride,
            heads=heads,
            key_heads=key_heads,
            key_dim=sizes.key_dim,
        )
        results = launcher.take(count, sizes.values)
        launcher.launch(
            "delta_rule",
            qkv=qkv,
            factors=factors,
            state=cache.state,
            out=results,
            heads=heads,
            key_heads=key_heads,
            key_dim=sizes.key_dim,
            value_dim=sizes.value_dim,
            **spans,
        )
        chosen = count if rows is None else rows.shape[0]
        out = launcher.take(chosen, sizes.values)
        launcher.launch(
            "gated_norm",
            x=results,
            z=z,
            weight=self._norm,
            chosen=rows,
            out=out,
            rows=chosen,
            heads=heads,
            dim=sizes.value_dim,
            stride=stride,
            eps=self._eps,
        )
        return out
