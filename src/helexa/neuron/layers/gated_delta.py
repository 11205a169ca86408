"""Gated DeltaNet: a mixer that keeps a state of fixed size in place of keys and values."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.batch import Span
from helexa.neuron.layers.delta_cache import DeltaCache
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.step import Step
from helexa.neuron.ops.gated_delta import convolve, gated_delta, log_decay
from helexa.neuron.weights.formats import GroupwiseTensor, Weight

_PIECE = 1024  # rows of a sequence that are computed at once, so that memory does not grow with its prompt
_LARGEST_STATE = 1 << 26  # bytes of one sequence in one layer; the largest models have 3 MiB


class GatedDeltaNet:
    """Linear attention by the gated delta rule (Yang et al., 2024) behind a short convolution; a mixer.

    The checkpoint has its projections apart (`in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`) or two in one
    (`in_proj_qkvz`, `in_proj_ba`), where the rows of each key head and of its value heads lie together.

    Args:
        key_heads, heads: Hk and Hv; each key head serves Hv / Hk value heads.
        key_dim, value_dim: Dk and Dv.
        kernel: K, tokens that the convolution sees.
        eps: of the norm of each head's result.
    """

    page_bytes = 0

    def __init__(
        self,
        loader: Loader,
        prefix: str,
        *,
        hidden: int,
        key_heads: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        eps: float,
    ) -> None:
        if heads % key_heads:
            raise ModelFileError(f"{heads} value heads cannot share {key_heads} key heads")
        keys, values, served = key_heads * key_dim, heads * value_dim, heads // key_heads
        mixed = 2 * keys + values
        self._shapes = (kernel - 1, mixed), (heads, key_dim, value_dim)
        self.state_bytes = 4 * sum(math.prod(shape) for shape in self._shapes)
        if self.state_bytes > _LARGEST_STATE:
            raise ModelFileError(f"{heads} heads of {key_dim} by {value_dim} make a state of {self.state_bytes} bytes")
        self._device = loader.ops.device
        # On a CPU each state stays in cache while it is read several times; elsewhere few kernels are what counts.
        self._together = self._device.type != "cpu"
        if f"{prefix}.in_proj_qkvz.weight" in loader:
            widths = (key_dim, key_dim, served * value_dim, served * value_dim)
            parts = [_ungrouped(loader, f"{prefix}.in_proj_qkvz.weight", hidden, key_heads, widths)]
        else:
            apart = {"in_proj_qkv": mixed, "in_proj_z": values}
            parts = [loader.matrix(f"{prefix}.{name}.weight", (rows, hidden)) for name, rows in apart.items()]
        if f"{prefix}.in_proj_ba.weight" in loader:
            parts += [_ungrouped(loader, f"{prefix}.in_proj_ba.weight", hidden, key_heads, (served, served))]
        else:
            parts += [loader.matrix(f"{prefix}.in_proj_{name}.weight", (heads, hidden)) for name in "ba"]
        self._in = loader.ops.linear(parts, None)
        self._widths = (mixed, values, heads, heads)
        self._kernel = loader.plain(f"{prefix}.conv1d.weight", (mixed, 1, kernel))[:, 0].T.contiguous()
        self._rate = loader.vector(f"{prefix}.A_log", heads).exp()
        self._bias = loader.vector(f"{prefix}.dt_bias", heads)
        self._heads = {"q": (key_heads, key_dim), "k": (key_heads, key_dim), "v": (heads, value_dim)}
        self._norm = loader.norm(f"{prefix}.norm", value_dim, eps)
        self._out = loader.linear({f"{prefix}.out_proj": hidden}, values)

    def new_cache(self, pages: int, slots: int) -> DeltaCache:
        """Room for the states of `slots` sequences; each is cleared when a sequence begins."""
        return DeltaCache(
            *(torch.empty(slots, *shape, dtype=torch.float32, device=self._device) for shape in self._shapes)
        )

    def __call__(self, x: Tensor, cache: DeltaCache, step: Step, rows: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H], or [S, H] for `rows` [S] only; the settled rows of each span change its state."""
        mixed, z, b, a = self._in(x).split(self._widths, dim=-1)
        inputs = (mixed, log_decay(a, self._rate, self._bias), b.float().sigmoid())
        out = torch.empty(x.shape[0], *self._heads["v"], device=x.device)
        spans = step.batch.spans
        for span in spans:
            if span.prefix == 0:
                cache.clear(span.slot)
        if self._together and len(slots := step.single_slots):
            states, count = cache.gather(slots), len(slots)
            out[:count] = self._advance([part[:count, None] for part in inputs], states)[:, 0]
            cache.scatter(slots, states)
            spans = spans[count:]
        for span in spans:
            for piece, state in _pieces(span, cache):
                out[piece] = self._advance([part[None, piece] for part in inputs], state)[0]
        if rows is not None:
            out, z = out[rows], z[rows]
        found = self._norm(out.flatten(0, 1)).view(z.shape)
        return self._out((found * F.silu(z.float())).to(x.dtype))

    def _advance(self, inputs: list[Tensor], state: DeltaCache) -> Tensor:
        """Projections, decay and beta of T tokens in each of B sequences, [B, T, ..] -> float32 [B, T, Hv, Dv]."""
        mixed, g, beta = inputs
        sizes = [math.prod(shape) for shape in self._heads.values()]
        parts = convolve(mixed, self._kernel, state.conv).split(sizes, dim=-1)
        q, k, v = (part.unflatten(-1, shape) for part, shape in zip(parts, self._heads.values(), strict=True))
        return gated_delta(q, k, v, g, beta, state.state)


def _pieces(span: Span, cache: DeltaCache) -> Iterator[tuple[slice, DeltaCache]]:
    """Rows that are computed at once, each with the state that they change; drafts change a copy."""
    state, settled = cache.at(span.slot), span.rows.start + span.settled
    for start in range(span.rows.start, settled, _PIECE):
        yield slice(start, min(start + _PIECE, settled)), state
    if settled < span.rows.stop:
        yield slice(settled, span.rows.stop), state.clone()


def _ungrouped(loader: Loader, name: str, inputs: int, groups: int, widths: tuple[int, ...]) -> Any:
    """A matrix whose rows lie group by group, each group with so many of each part, as one part behind the other."""
    shape = (groups * sum(widths), inputs)

    def read() -> Weight:
        weight = loader.weight(name, shape)
        parts = torch.arange(shape[0]).view(groups, -1).split(widths, dim=1)
        order = torch.cat([part.flatten() for part in parts])
        return weight.rows(order) if isinstance(weight, GroupwiseTensor) else weight[order]

    return loader.prepared(name, shape, read)
