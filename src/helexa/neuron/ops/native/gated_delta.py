"""Gated DeltaNet layers on native kernels."""

from collections.abc import Callable

from helexa.neuron import tensors
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.gated_delta import DeltaSizes, DeltaWeights
from helexa.neuron.ops.kernel_header import LANES, MAX_DIM
from helexa.neuron.ops.native.convolution_and_state_space import SpanList
from helexa.neuron.ops.native.launcher import Launcher
from helexa.neuron.ops.state_cache import MatrixCache
from helexa.neuron.tensors import Tensor


class NativeDelta:
    """Operator of a Gated DeltaNet layer on native kernels; implements `DeltaOp`."""

    def __init__(
        self,
        launcher: Launcher,
        sizes: DeltaSizes,
        weights: DeltaWeights,
        spans: SpanList,
        register: Callable[[MatrixCache], None],
    ) -> None:
        self._launcher = launcher
        self._sizes = sizes
        self._kernel = weights.kernel.float().contiguous()
        self._rate, self._bias, self._norm = (
            x.float().contiguous() for x in (weights.rate, weights.bias, weights.norm)
        )
        self._eps = weights.eps
        self._spans = spans  # the spans of the current batch
        self._register = register  # function that `new_cache` calls with each new cache

    @staticmethod
    def fits(sizes: DeltaSizes) -> bool:
        """Return whether the kernels support the head widths in `sizes`."""
        return sizes.key_dim % LANES == 0 and sizes.value_dim % LANES == 0 and sizes.key_dim <= MAX_DIM

    def new_cache(self, slots: int) -> MatrixCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        cache = MatrixCache(*(tensors.empty(slots, *shape) for shape in self._sizes.state_shapes))
        self._register(cache)
        return cache

    def __call__(
        self, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, cache: MatrixCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        """Apply the layer to the T rows of a step, and update `cache` (see `DeltaOp`)."""
        launcher, sizes, count = self._launcher, self._sizes, mixed.shape[0]
        heads, key_heads, stride = sizes.heads, sizes.key_heads, mixed.stride(0)
        assert stride == z.stride(0) == b.stride(0) == a.stride(0), "mixed, z, b, a must be columns of one tensor"
        spans = {"span_count": self._spans.count, "spans": self._spans.spans}
        qkv = launcher.take(count, sizes.mixed)
        launcher.launch(
            "convolve",
            x=mixed,
            weights=self._kernel,
            bias=None,
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
        # The kernel computes one token of a sequence after another, which takes fewer operations than chunks of tokens.
        # A thread computes a few columns of a state for all tokens, so that these columns stay in the processor cache.
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
