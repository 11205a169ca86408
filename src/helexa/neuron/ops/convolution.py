"""Short causal convolutions over tokens, whose recurrent state is past inputs."""

from dataclasses import dataclass
from math import prod
from typing import Protocol

from helexa.neuron import tensors
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.state_cache import ConvCache, advance_spans
from helexa.neuron.tensors import Device, Tensor

MOST_TOKENS = 64  # maximum number K of tokens that a convolution covers; native kernels keep K inputs on the stack


@dataclass(frozen=True)
class ConvWeights:
    """Float32 weights of a causal depthwise convolution over K tokens of C columns."""

    kernel: Tensor  # [K, C]; the last row applies to the current token
    bias: Tensor | None = None  # [C]; None for no bias


@dataclass(frozen=True)
class ConvSizes:
    """Sizes of a gated short convolution."""

    width: int  # C, number of columns
    kernel: int  # K, number of tokens that the convolution covers

    @property
    def state_shape(self) -> tuple[int, int]:
        """Shape of one sequence's part of `ConvCache.conv`."""
        return self.kernel - 1, self.width

    @property
    def state_bytes(self) -> int:
        """Number of bytes of the recurrent state of one sequence, in float32."""
        return 4 * prod(self.state_shape)


class ConvOp(Protocol):
    """Operator that computes a gated short convolution without its projections."""

    def new_cache(self, slots: int) -> ConvCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        ...

    def __call__(self, x: Tensor, cache: ConvCache, batch: Batch, rows: Tensor | None) -> Tensor:
        """Return `c * convolution(b * v)` for the T rows (tokens) of a step.

        The states in `cache` change as `advance_spans` describes.

        Args:
            x: [T, 3 * C], the gates b and c, and the values v, with C columns each.
            rows: indexes of the S rows whose outputs are returned; None for all rows.

        Returns:
            [S, C], or [T, C] if `rows` is None, in the activation dtype.
        """
        ...


class ShortConvolution:
    """Operator of a gated short convolution in plain torch; implements `ConvOp`."""

    def __init__(self, sizes: ConvSizes, weights: ConvWeights, device: Device) -> None:
        self._sizes = sizes
        self._weights = weights
        self._device = device  # device of the recurrent states

    def new_cache(self, slots: int) -> ConvCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        return ConvCache(tensors.empty(slots, *self._sizes.state_shape, device=self._device))

    def __call__(self, x: Tensor, cache: ConvCache, batch: Batch, rows: Tensor | None) -> Tensor:
        """Apply the convolution to the T rows of a step (see `ConvOp`)."""
        b, c, values = x.float().chunk(3, dim=-1)
        out = tensors.empty_like(c)
        together = self._device.type != "cpu"
        advance_spans(self._advance, [b * values], cache, batch, out, together)
        out *= c
        return (out if rows is None else out[rows]).to(x.dtype)

    def _advance(self, inputs: list[Tensor], state: ConvCache) -> Tensor:
        """Return the convolution, float32 [sequences, tokens, columns]; update `state`."""
        return convolve(inputs[0], self._weights.kernel, state.conv, self._weights.bias)


def convolve(x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a causal depthwise convolution over K tokens to C columns.

    Args:
        x: [B, T, C], inputs of T tokens in each of B sequences.
        weight: [K, C], float32; the last row applies to the current token.
        state: [B, K - 1, C], inputs of the K - 1 tokens before x; replaced in place by the last K - 1 inputs.
        bias: [C], float32; None for no bias.

    Returns:
        float32 [B, T, C].
    """
    tokens = tensors.cat((state, x), dim=1)
    state.copy_(tokens[:, x.shape[1] :])
    tokens = tokens.float()
    out = tokens[:, : x.shape[1]] * weight[0]
    for past, row in enumerate(weight[1:], start=1):
        out.addcmul_(tokens[:, past : past + x.shape[1]], row)
    return out if bias is None else out.add_(bias)
