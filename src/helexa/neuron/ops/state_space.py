"""Compute a Mamba-2 layer between its input projection and its norm.

The layer applies a short convolution over tokens to inputs, keys and queries. The scan (see `scan`) then updates and
reads the recurrent state of each sequence. Finally, the layer adds a part of the inputs, and multiplies by a gate.
"""

from dataclasses import dataclass
from math import prod
from typing import Protocol

from helexa.neuron import tensors
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.convolution import ConvWeights, convolve
from helexa.neuron.ops.gated_delta import wide
from helexa.neuron.ops.scan import scan
from helexa.neuron.ops.state_cache import MatrixCache, advance_spans
from helexa.neuron.tensors import Device, Tensor


@dataclass(frozen=True)
class ScanSizes:
    """Sizes of a Mamba-2 layer."""

    heads: int  # H, number of heads
    groups: int  # G, number of groups. H / G consecutive heads share keys and query.
    head_dim: int  # P, width of the input of a head
    state_dim: int  # N, width of keys and query
    kernel: int  # K, number of tokens that the convolution covers

    @property
    def values(self) -> int:
        """Width of the inputs of all heads of a token together, H * P."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of the keys of all groups of a token together, G * N, as of the queries."""
        return self.groups * self.state_dim

    @property
    def mixed(self) -> int:
        """C, the number of inputs, keys and queries per token."""
        return self.values + 2 * self.keys

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one sequence's part of `MatrixCache.conv` and `MatrixCache.state`."""
        return (self.kernel - 1, self.mixed), (self.heads, self.state_dim, self.head_dim)

    @property
    def state_bytes(self) -> int:
        """Number of bytes of the recurrent state of one sequence, in float32."""
        return 4 * sum(map(prod, self.state_shapes))


@dataclass(frozen=True)
class ScanWeights:
    """Float32 weights of a Mamba-2 layer without its projections and its norm."""

    convolution: ConvWeights  # weights of the convolution over C columns
    rate: Tensor  # [H], decay rate of each head
    bias: Tensor  # [H], bias of the step size of each head
    skip: Tensor  # [H], part of the inputs that is added to the result of each head


class ScanOp(Protocol):
    """Operator that computes a Mamba-2 layer without its projections and its norm."""

    def new_cache(self, slots: int) -> MatrixCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        ...

    def __call__(
        self, z: Tensor, mixed: Tensor, steps: Tensor, cache: MatrixCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        """Apply the layer to the T rows (tokens) of a step, and update `cache`.

        The states change as `advance_spans` describes. `ScanSizes` defines the sizes C, H and P.

        Args:
            z: [T, H * P], inputs of the output gate.
            mixed: [T, C], inputs, keys and queries before the convolution.
            steps: [T, H], inputs of the step sizes, which are `softplus(steps + bias)`.
            rows: [S], indexes of the rows whose outputs are returned; None for all rows.

        Returns:
            [S, H * P], or [T, H * P] if `rows` is None, in the activation dtype.
        """
        ...


class StateSpace:
    """Operator of a Mamba-2 layer in plain torch; implements `ScanOp`."""

    def __init__(self, sizes: ScanSizes, weights: ScanWeights, device: Device) -> None:
        self._sizes = sizes
        self._weights = weights
        self._device = device  # device of the recurrent states
        self._widths = [sizes.values, sizes.keys, sizes.keys]

    def new_cache(self, slots: int) -> MatrixCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        return MatrixCache(*(tensors.empty(slots, *shape, device=self._device) for shape in self._sizes.state_shapes))

    def __call__(
        self, z: Tensor, mixed: Tensor, steps: Tensor, cache: MatrixCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        """Apply the layer to the T rows of a step, and update `cache` (see `ScanOp`)."""
        dt = tensors.nn.functional.softplus(wide(steps, self._device) + self._weights.bias)
        inputs = [mixed, dt.float(), (dt * -self._weights.rate).float()]
        out = tensors.empty(len(mixed), self._sizes.heads, self._sizes.head_dim, device=mixed.device)
        advance_spans(self._advance, inputs, cache, batch, out, self._device.type != "cpu")
        if rows is not None:
            out, z = out[rows], z[rows]
        return (out.view(z.shape) * tensors.nn.functional.silu(z.float())).to(mixed.dtype)

    def _advance(self, inputs: list[Tensor], state: MatrixCache) -> Tensor:
        """Return the result of each head before the gate, float32 [M, T, H, P].

        Args:
            inputs: three tensors [M, T, width] for T tokens of each of M sequences: inputs, keys and queries before the
                convolution, the step sizes, and the logarithm of the decay.
            state: states of the M sequences, changed in place.
        """
        sizes, weights = self._sizes, self._weights
        mixed, dt, g = inputs
        convolved = convolve(mixed, weights.convolution.kernel, state.conv, weights.convolution.bias)
        x, b, c = tensors.nn.functional.silu(convolved, inplace=True).split(self._widths, dim=-1)
        x = x.unflatten(-1, (sizes.heads, sizes.head_dim))
        b, c = (part.unflatten(-1, (sizes.groups, sizes.state_dim)) for part in (b, c))
        return scan(x * dt[..., None], b, c, g, state.state) + x * weights.skip[:, None]
