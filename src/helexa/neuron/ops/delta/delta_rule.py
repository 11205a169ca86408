"""Computation of a Gated DeltaNet layer between its input projections and its output projection.

The layer applies a short convolution over tokens to queries, keys and values. The gated delta rule (see `gated_delta`)
then updates and reads the recurrent state of each sequence. Finally, the layer normalizes and gates the result of each
head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from helexa.neuron.ops.batch import Batch, Span
from helexa.neuron.ops.delta.delta_cache import DeltaCache
from helexa.neuron.ops.delta.gated_delta import convolve, gated_delta, log_decay
from helexa.neuron.ops.norm import NormOp
from helexa.neuron.ops.wide import wide

_ROWS_AT_ONCE = 1024  # rows of a sequence computed at once; bounds the memory of long prompts


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a Gated DeltaNet layer.

    Attributes:
        key_heads: Hk, number of key heads, which equals the number of query heads.
        heads: Hv, number of value heads. Hv / Hk value heads share one key head.
        key_dim: Dk, width of a query or key head.
        value_dim: Dv, width of a value head.
        kernel: K, number of tokens that the convolution covers.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """Width of the key vectors of all heads of a token together, Hk * Dk. The queries have the same width."""
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
        """Shapes of the recurrent state of one sequence: of `DeltaCache.conv` and of `DeltaCache.state`."""
        return (self.kernel - 1, self.mixed), (self.heads, self.key_dim, self.value_dim)

    @property
    def state_bytes(self) -> int:
        """Number of bytes of the recurrent state of one sequence, in float32."""
        return 4 * sum(map(prod, self.state_shapes))


@dataclass(frozen=True)
class DeltaWeights:
    """Weights of a Gated DeltaNet layer without its projections, all float32. `DeltaSizes` defines the sizes.

    Attributes:
        kernel: [K, C], weights of the convolution over K tokens; the last row applies to the current token.
        rate: [Hv], decay rate of each value head (see `log_decay`).
        bias: [Hv], bias of the decay of each value head (see `log_decay`).
        norm: [Dv], weight of the RMS norm on the result of each head.
        eps: epsilon of the RMS norm.
    """

    kernel: Tensor
    rate: Tensor
    bias: Tensor
    norm: Tensor
    eps: float


class DeltaOp(Protocol):
    """Operator that computes a Gated DeltaNet layer without its input and output projections.

    `DeltaSizes` defines the sizes C, Hv and Dv in the shapes of the arguments.
    """

    def new_cache(self, slots: int) -> DeltaCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        ...

    def __call__(
        self, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, cache: DeltaCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        """Apply the layer to the T rows (tokens) of one step, and update the recurrent states in `cache`.

        A new sequence starts with a state of zeros. Only accepted tokens change a state, draft tokens do not (see
        `Span.settled`). `DeltaSizes` defines the sizes C, Hv and Dv.

        Args:
            mixed: [T, C], queries, keys and values before the convolution.
            z: [T, Hv * Dv], inputs of the output gate.
            b: [T, Hv], inputs of beta, the share of the state's old content that a token replaces.
            a: [T, Hv], inputs of the decay of the state.
            cache: recurrent states of the layer.
            batch: the sequences of the rows and the slots of their states.
            rows: [S], indexes of the rows whose outputs are returned; None for all rows.

        Returns:
            [S, Hv * Dv], or [T, Hv * Dv] if `rows` is None, in the activation dtype.
        """
        ...


class DeltaRule:
    """Operator of a Gated DeltaNet layer in plain torch; implements `DeltaOp`.

    Args:
        norm: operator of the RMS norm with the weight `weights.norm`.
        device: device of the recurrent states.
    """

    def __init__(self, sizes: DeltaSizes, weights: DeltaWeights, norm: NormOp, device: torch.device) -> None:
        self._weights = weights
        self._norm = norm
        self._device = device
        self._state_shapes = sizes.state_shapes
        keys = (sizes.key_heads, sizes.key_dim)
        self._head_shapes = (keys, keys, (sizes.heads, sizes.value_dim))
        self._widths = [sizes.keys, sizes.keys, sizes.values]
        # A CPU computes one sequence at a time, so that the state stays in the processor cache. Other devices compute
        # the decode rows of all sequences together, in few kernel launches.
        self._together = device.type != "cpu"

    def new_cache(self, slots: int) -> DeltaCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        return DeltaCache(*(torch.empty(slots, *shape, device=self._device) for shape in self._state_shapes))

    def __call__(
        self, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, cache: DeltaCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        """Apply the layer to the T rows of one step, and update the recurrent states in `cache` (see `DeltaOp`).

        Returns:
            [S, Hv * Dv] for the S rows with the indexes `rows`, or [T, Hv * Dv] if `rows` is None.
        """
        inputs = (mixed, log_decay(a, self._weights.rate, self._weights.bias), wide(b, self._device).sigmoid().float())
        out = torch.empty(len(mixed), *self._head_shapes[-1], device=mixed.device)
        spans = batch.span_list
        for span in spans:
            if span.prefix == 0:
                cache.clear(span.slot)
        if self._together and (count := batch.singles):
            slots = batch.spans.state_slots[:count].long()
            states = cache.gather(slots)
            out[:count] = self._advance([x[:count, None] for x in inputs], states)[:, 0]
            cache.scatter(slots, states)
            spans = spans[count:]
        for span in spans:
            for rows_at_once, state in _row_slices(span, cache):
                out[rows_at_once] = self._advance([x[None, rows_at_once] for x in inputs], state)[0]
        if rows is not None:
            out, z = out[rows], z[rows]
        normed = self._norm(out.flatten(0, 1)).view(z.shape)
        return (normed * F.silu(z.float())).to(mixed.dtype)

    def _advance(self, inputs: list[Tensor], state: DeltaCache) -> Tensor:
        """Apply the convolution and the gated delta rule to T tokens of each of B sequences.

        Returns:
            float32 [B, T, Hv, Dv], the result of each value head before the norm.

        Args:
            inputs: three tensors [B, T, width]: queries, keys and values before the convolution, the logarithm of the
                decay, and beta.
            state: states of the B sequences, changed in place.
        """
        mixed, g, beta = inputs
        convolved = convolve(mixed, self._weights.kernel, state.conv).split(self._widths, dim=-1)
        q, k, v = (x.unflatten(-1, shape) for x, shape in zip(convolved, self._head_shapes, strict=True))
        return gated_delta(q, k, v, g, beta, state.state)


def _row_slices(span: Span, cache: DeltaCache) -> Iterator[tuple[slice, DeltaCache]]:
    """Divide the rows of a span (one sequence) into slices. Yield each slice with the recurrent state to update.

    For rows with accepted tokens, this is the state in `cache`. For rows with draft tokens, it is a copy of the state.
    """
    state, settled = cache.at(span.slot), span.start + span.settled
    for start in range(span.start, settled, _ROWS_AT_ONCE):
        yield slice(start, min(start + _ROWS_AT_ONCE, settled)), state
    if settled < span.stop:
        yield slice(settled, span.stop), state.clone()
