"""Computation between the projections of a Gated DeltaNet layer.

Queries, keys and values pass a short convolution. Then the gated delta rule (see `gated_delta`) updates and reads the
state of each sequence. The result of each head is normalized and gated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from helexa.neuron.ops.batch import Batch, Span
from helexa.neuron.ops.delta.delta_cache import DeltaCache
from helexa.neuron.ops.delta.gated_delta import convolve, gated_delta, log_decay
from helexa.neuron.ops.norm import NormOp

_ROWS_AT_ONCE = 1024  # rows of a sequence computed at once; bounds the memory of long prompts


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a Gated DeltaNet layer.

    Hk heads of queries and keys have width Dk; Hv heads of values have width Dv. Hv / Hk value heads share one key
    head. The convolution covers K tokens.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """Total width of the queries of all heads, and of the keys of all heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Total width of the values of all heads."""
        return self.heads * self.value_dim

    @property
    def mixed(self) -> int:
        """C, total width of queries, keys and values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True)
class DeltaWeights:
    """Weights of the rule, all float32.

    Attributes:
        kernel: [K, C], weights of the convolution; the last row applies to the current token.
        rate, bias: [Hv], parameters of the decay (see `log_decay`).
        norm: [Dv], weight of the output norm of each head.
        eps: epsilon of the output norm.
    """

    kernel: Tensor
    rate: Tensor
    bias: Tensor
    norm: Tensor
    eps: float


class DeltaOp(Protocol):
    """The gated delta rule, prepared with the weights of one layer."""

    def new_cache(self, slots: int) -> DeltaCache:
        """Return uninitialized memory for the states of `slots` sequences."""
        ...

    def __call__(
        self, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, cache: DeltaCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        """Compute one step. The settled rows of each span change its state; a new sequence starts from zeros.

        Args:
            mixed: [T, C], queries, keys and values before the convolution.
            z: [T, Hv * Dv], gate of the output.
            b, a: [T, Hv], inputs of beta and of the decay.
            rows: [S] rows to return; None for all rows.

        Returns:
            [S, Hv * Dv] of the activation dtype.
        """
        ...


class DeltaRule:
    """The gated delta rule in plain torch, span by span.

    Args:
        norm: prepared norm with the weights' norm weight.
        device: device of the states.
    """

    def __init__(self, sizes: DeltaSizes, weights: DeltaWeights, norm: NormOp, device: torch.device) -> None:
        self._weights = weights
        self._norm = norm
        self._device = device
        self._state = (sizes.kernel - 1, sizes.mixed), (sizes.heads, sizes.key_dim, sizes.value_dim)
        keys = (sizes.key_heads, sizes.key_dim)
        self._head_shapes = (keys, keys, (sizes.heads, sizes.value_dim))
        self._widths = [sizes.keys, sizes.keys, sizes.values]
        # On a CPU, separate spans keep each state in the processor cache; other devices need few kernel launches.
        self._together = device.type != "cpu"

    @staticmethod
    def state_bytes(sizes: DeltaSizes) -> int:
        """Return the bytes of one sequence's state in one layer."""
        return 4 * ((sizes.kernel - 1) * sizes.mixed + sizes.heads * sizes.key_dim * sizes.value_dim)

    def new_cache(self, slots: int) -> DeltaCache:
        """Return uninitialized memory for the states of `slots` sequences."""
        return DeltaCache(*(torch.empty(slots, *shape, device=self._device) for shape in self._state))

    def __call__(
        self, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, cache: DeltaCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        """Compute one step and update the states with the settled rows; return [S, Hv * Dv]."""
        inputs = (mixed, log_decay(a, self._weights.rate, self._weights.bias), b.float().sigmoid())
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
        """Apply the rule to T tokens in each of B sequences: [B, T, ..] -> float32 [B, T, Hv, Dv].

        `inputs` are the projections and the inputs of decay and beta.
        """
        mixed, g, beta = inputs
        convolved = convolve(mixed, self._weights.kernel, state.conv).split(self._widths, dim=-1)
        q, k, v = (x.unflatten(-1, shape) for x, shape in zip(convolved, self._head_shapes, strict=True))
        return gated_delta(q, k, v, g, beta, state.state)


def _row_slices(span: Span, cache: DeltaCache) -> Iterator[tuple[slice, DeltaCache]]:
    """Yield slices of rows computed at once, with the state that each changes; draft rows change a copy."""
    state, settled = cache.at(span.slot), span.start + span.settled
    for start in range(span.start, settled, _ROWS_AT_ONCE):
        yield slice(start, min(start + _ROWS_AT_ONCE, settled)), state
    if settled < span.stop:
        yield slice(settled, span.stop), state.clone()
