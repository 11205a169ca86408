"""Gated short convolution, the mixer of LFM2, with a recurrent state."""

from helexa.core.errors import UnsupportedModelError
from helexa.neuron.layers.block import Step
from helexa.neuron.layers.loader import Loader
from helexa.neuron.ops.convolution import MOST_TOKENS, ConvSizes, ConvWeights
from helexa.neuron.ops.rank_group_and_shares import RowRange
from helexa.neuron.ops.state_cache import ConvCache
from helexa.neuron.tensors import Tensor


class GatedShortConvolution:
    """Causal convolution over a few tokens between two gates (Liquid AI, LFM2, 2025).

    The class implements `Mixer`. With tensor parallelism, each rank computes some of the columns.

    Args:
        kernel: number of tokens in the convolution's window.
    """

    page_bytes = 0

    def __init__(self, loader: Loader, prefix: str, *, hidden: int, kernel: int) -> None:
        require_window(kernel)
        shares = loader.input_shares(f"{prefix}.out_proj.weight", hidden)
        own = shares.own
        parts = tuple(own.times(1, start, 3 * hidden) for start in (0, hidden, 2 * hidden))
        self._in = loader.product(*loader.matrices({f"{prefix}.in_proj": parts}, hidden))
        sizes = ConvSizes(len(own), kernel)
        weights = conv_weights(loader, f"{prefix}.conv", hidden, kernel, (own,))
        self.state_bytes = loader.ops.state_bytes(sizes)
        self._convolution = loader.ops.short_convolution(sizes, weights)
        self._out = loader.row_parallel_linear(f"{prefix}.out_proj", hidden, shares)

    def new_cache(self, pages: int, slots: int) -> ConvCache:
        """Return a cache of `slots` recurrent states; `pages` has no effect."""
        return self._convolution.new_cache(slots)

    def __call__(self, x: Tensor, cache: ConvCache, step: Step, rows: Tensor | None = None) -> Tensor:
        """Update the states in `cache`, and return the outputs (see `Mixer`)."""
        return self._out(self._convolution(self._in(x), cache, step.batch, rows))


def require_window(kernel: int) -> None:
    """Raise UnsupportedModelError if no convolution over `kernel` tokens is possible."""
    if not 2 <= kernel <= MOST_TOKENS:
        raise UnsupportedModelError(
            f"a convolution over {kernel} tokens is not supported, only over 2 to {MOST_TOKENS}"
        )


def conv_weights(loader: Loader, name: str, width: int, kernel: int, ranges: tuple[RowRange, ...]) -> ConvWeights:
    """Return the weights of a depthwise convolution, with its bias if there is one.

    Args:
        name: name of the convolution. The checkpoint has `name.weight` [width, 1, kernel] and maybe `name.bias`.
        ranges: this rank's ranges of the `width` columns.
    """
    weight = loader.plain(f"{name}.weight", (width, 1, kernel), ranges)[:, 0].T.contiguous()
    return ConvWeights(weight, loader.vector(f"{name}.bias", width, ranges) if f"{name}.bias" in loader else None)
