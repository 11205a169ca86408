"""Compute a Gated DeltaNet layer between its input and output projections.

The layer applies a short convolution over tokens to queries, keys and values. The gated delta rule (see `gated_delta`)
then updates and reads the recurrent state of each sequence. Finally, the layer normalizes and gates the result of each
head.
"""

from dataclasses import dataclass
from math import prod
from typing import Protocol

from helexa.neuron import tensors
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.convolution import convolve
from helexa.neuron.ops.gated_delta import gated_delta, log_decay, wide
from helexa.neuron.ops.operators import NormOp
from helexa.neuron.ops.state_cache import MatrixCache, advance_spans
from helexa.neuron.tensors import Device, Tensor


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a Gated DeltaNet layer."""

    key_heads: int  # Hk, number of key heads, which equals the number of query heads
    heads: int  # Hv, number of value heads. Hv / Hk value heads share one key head.
    key_dim: int  # Dk, width of a query or key head
    value_dim: int  # Dv, width of a value head
    kernel: int  # K, number of tokens that the convolution covers

    @property
    def keys(self) -> int:
        """Width of all key heads of a token together, Hk * Dk, as of the queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of the value vectors of all heads of a token together, Hv * Dv."""
        return self.heads * self.value_dim

    @property
    def mixed(self) -> int:
        """C, the number of query, key and value numbers per token in all heads together."""
        return 2 * self.keys + self.values

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one sequence's part of `MatrixCache.conv` and `MatrixCache.state`."""
        return (self.kernel - 1, self.mixed), (self.heads, self.key_dim, self.value_dim)

    @property
    def state_bytes(self) -> int:
        """Number of bytes of the recurrent state of one sequence, in float32."""
        return 4 * sum(map(prod, self.state_shapes))


@dataclass(frozen=True)
class DeltaWeights:
    """Float32 weights of a Gated DeltaNet layer with `DeltaSizes`."""

    kernel: Tensor  # [K, C], weights of the convolution over K tokens; the last row applies to the current token
    rate: Tensor  # [Hv], decay rate of each value head (see `log_decay`)
    bias: Tensor  # [Hv], bias of the decay of each value head (see `log_decay`)
    norm: Tensor  # [Dv], weight of the RMS norm on the result of each head
    eps: float  # epsilon of the RMS norm


class DeltaOp(Protocol):
    """Operator that computes a Gated DeltaNet layer without its projections."""

    def new_cache(self, slots: int) -> MatrixCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        ...

    def __call__(
        self, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, cache: MatrixCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        """Apply the layer to the T rows (tokens) of a step, and update `cache`.

        The states change as `advance_spans` describes. `DeltaSizes` defines the sizes C, Hv and Dv.

        Args:
            mixed: [T, C], queries, keys and values before the convolution.
            z: [T, Hv * Dv], inputs of the output gate.
            b: [T, Hv], inputs of beta, the share of the state's old content that a token replaces.
            a: [T, Hv], inputs of the decay of the state.
            rows: [S], indexes of the rows whose outputs are returned; None for all rows.

        Returns:
            [S, Hv * Dv], or [T, Hv * Dv] if `rows` is None, in the activation dtype.
        """
        ...


class DeltaRule:
    """Operator of a Gated DeltaNet layer in plain torch; implements `DeltaOp`."""

    def __init__(self, sizes: DeltaSizes, weights: DeltaWeights, norm: NormOp, device: Device) -> None:
        self._weights = weights
        self._norm = norm  # operator of the RMS norm with the weight `weights.norm`
        self._device = device  # device of the recurrent states
        self._state_shapes = sizes.state_shapes
        keys = (sizes.key_heads, sizes.key_dim)
        self._head_shapes = (keys, keys, (sizes.heads, sizes.value_dim))
        self._widths = [sizes.keys, sizes.keys, sizes.values]
        self._together = device.type != "cpu"

    def new_cache(self, slots: int) -> MatrixCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        return MatrixCache(*(tensors.empty(slots, *shape, device=self._device) for shape in self._state_shapes))

    def __call__(
        self, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, cache: MatrixCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        """Apply the layer to the T rows of a step, and update `cache` (see `DeltaOp`)."""
        inputs = (mixed, log_decay(a, self._weights.rate, self._weights.bias), wide(b, self._device).sigmoid().float())
        out = tensors.empty(len(mixed), *self._head_shapes[-1], device=mixed.device)
        advance_spans(self._advance, inputs, cache, batch, out, self._together)
        if rows is not None:
            out, z = out[rows], z[rows]
        normed = self._norm(out.flatten(0, 1)).view(z.shape)
        return (normed * tensors.nn.functional.silu(z.float())).to(mixed.dtype)

    def _advance(self, inputs: list[Tensor], state: MatrixCache) -> Tensor:
        """Return the result of each value head before the norm, float32 [B, T, Hv, Dv].

        Args:
            inputs: three tensors [B, T, width] for T tokens of each of B sequences: queries, keys and values before the
                convolution, the logarithm of the decay, and beta.
            state: states of the B sequences, changed in place.
        """
        mixed, g, beta = inputs
        convolved = tensors.nn.functional.silu(convolve(mixed, self._weights.kernel, state.conv), inplace=True)
        parts = zip(convolved.split(self._widths, dim=-1), self._head_shapes, strict=True)
        q, k, v = (x.unflatten(-1, shape) for x, shape in parts)
        return gated_delta(q, k, v, g, beta, state.state)
