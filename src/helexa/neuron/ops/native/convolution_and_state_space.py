"""Short convolutions and the scan of Mamba-2 on native kernels."""

from collections.abc import Callable

from helexa.neuron import tensors
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.convolution import ConvSizes, ConvWeights
from helexa.neuron.ops.native.launcher import Launcher
from helexa.neuron.ops.state_cache import ConvCache, MatrixCache
from helexa.neuron.ops.state_space import ScanSizes, ScanWeights
from helexa.neuron.tensors import Tensor


class SpanList:
    """The spans of the current batch in the layout of the kernels.

    From the first `lay` on, the tensors have fixed addresses, because captured graphs contain these addresses.
    """

    def __init__(self) -> None:
        self.count = tensors.zeros(1, dtype=tensors.int64)  # int64 [1], number of spans of the current batch
        # int64 [.., 5], one struct `span` of kernels.h per line; only the first `count` lines are used
        self.spans = tensors.zeros(0, 5, dtype=tensors.int64)

    def lay(self, batch: Batch) -> None:
        """Replace the contents of `count` and `spans` with the spans of `batch`."""
        spans = batch.span_list
        if not len(self.spans):
            # allocated only once, because all batches have the same capacity
            self.spans = tensors.zeros(batch.capacity.sequences, 5, dtype=tensors.int64)
        self.count.numpy()[0] = len(spans)
        self.spans.numpy()[: len(spans)] = [
            (span.start, span.stop - span.start, span.settled, span.slot, span.prefix == 0) for span in spans
        ]


class NativeShortConvolution:
    """Operator of a gated short convolution on a native kernel; implements `ConvOp`."""

    def __init__(
        self,
        launcher: Launcher,
        sizes: ConvSizes,
        weights: ConvWeights,
        spans: SpanList,
        register: Callable[[ConvCache], None],
    ) -> None:
        self._launcher = launcher
        self._sizes = sizes
        self._kernel = weights.kernel.float().contiguous()
        self._bias = None if weights.bias is None else weights.bias.float().contiguous()
        self._spans = spans  # the spans of the current batch
        self._register = register  # function that `new_cache` calls with each new cache

    def new_cache(self, slots: int) -> ConvCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        cache = ConvCache(tensors.empty(slots, *self._sizes.state_shape))
        self._register(cache)
        return cache

    def __call__(self, x: Tensor, cache: ConvCache, batch: Batch, rows: Tensor | None) -> Tensor:
        """Apply the convolution to the T rows of a step (see `ConvOp`)."""
        width = self._sizes.width
        out = self._launcher.take(x.shape[0], width)
        self._launcher.launch(
            "gated_convolve",
            x=x,
            weights=self._kernel,
            bias=self._bias,
            state=cache.conv,
            span_count=self._spans.count,
            spans=self._spans.spans,
            out=out,
            width=width,
            taps=self._sizes.kernel,
        )
        return out if rows is None else self._launcher.choose_rows(out, rows)


class NativeStateSpace:
    """Operator of a Mamba-2 layer on native kernels; implements `ScanOp`.

    `NativeOps.unsupported_shape` checks whether the kernels support the widths of heads and states.
    """

    def __init__(
        self,
        launcher: Launcher,
        sizes: ScanSizes,
        weights: ScanWeights,
        spans: SpanList,
        register: Callable[[MatrixCache], None],
    ) -> None:
        self._launcher = launcher
        self._sizes = sizes
        bias = weights.convolution.bias
        self._kernel = weights.convolution.kernel.float().contiguous()
        self._kernel_bias = None if bias is None else bias.float().contiguous()
        self._rate, self._bias, self._skip = (
            x.float().contiguous() for x in (weights.rate, weights.bias, weights.skip)
        )
        self._spans = spans  # the spans of the current batch
        self._register = register  # function that `new_cache` calls with each new cache

    def new_cache(self, slots: int) -> MatrixCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        cache = MatrixCache(*(tensors.empty(slots, *shape) for shape in self._sizes.state_shapes))
        self._register(cache)
        return cache

    def __call__(
        self, z: Tensor, mixed: Tensor, steps: Tensor, cache: MatrixCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        """Apply the layer to the T rows of a step, and update `cache` (see `ScanOp`)."""
        launcher, sizes, count, stride = self._launcher, self._sizes, mixed.shape[0], mixed.stride(0)
        assert stride == z.stride(0) == steps.stride(0), "z, mixed, steps must be columns of one tensor"
        spans = {"span_count": self._spans.count, "spans": self._spans.spans}
        convolved = launcher.take(count, sizes.mixed)
        launcher.launch(
            "convolve",
            x=mixed,
            weights=self._kernel,
            bias=self._kernel_bias,
            state=cache.conv,
            out=convolved,
            width=sizes.mixed,
            stride=stride,
            taps=sizes.kernel,
            **spans,
        )
        factors = launcher.take(count, 2 * sizes.heads)
        launcher.launch(
            "scan_factors",
            steps=steps,
            rate=self._rate,
            bias=self._bias,
            factors=factors,
            rows=count,
            stride=stride,
            heads=sizes.heads,
        )
        out = launcher.take(count, sizes.values)
        # The kernel computes one token of a sequence after another, which takes fewer operations than chunks of tokens.
        # A thread computes a few columns of a state for all tokens, so that these columns stay in the processor cache.
        launcher.launch(
            "scan",
            mixed=convolved,
            factors=factors,
            skip=self._skip,
            z=z,
            state=cache.state,
            out=out,
            heads=sizes.heads,
            groups=sizes.groups,
            head_dim=sizes.head_dim,
            state_dim=sizes.state_dim,
            stride=stride,
            **spans,
        )
        return out if rows is None else launcher.choose_rows(out, rows)
