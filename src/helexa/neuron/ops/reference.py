"""The kernels in plain torch: right on every device, the oracle for all others."""

import math
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from helexa.neuron.ops import sampling
from helexa.neuron.ops.attention_kind import AttentionKind
from helexa.neuron.ops.batch import Batch, Chunk, DecodeGroup
from helexa.neuron.ops.constants import PAGE_SIZE
from helexa.neuron.ops.delta_rule import DeltaOp, DeltaRule, DeltaSizes, DeltaWeights
from helexa.neuron.ops.linear import DenseLinear, GatedLinear, LinearOp
from helexa.neuron.ops.mixture import Clamp, Expert, Mixture, MixtureOp, Routing
from helexa.neuron.ops.norm import HeadNorms, NormOp, RmsNorm
from helexa.neuron.weights.formats import GroupwiseTensor, Weight
from helexa.neuron.weights.quant_form import QuantForm
from helexa.neuron.weights.quantize import quantize

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
"""What a gate lets through, by name."""


class MatrixStore(Protocol):
    """Matrices by name, in the form in which kernels take them."""

    def get(self, name: str, shape: tuple[int, ...]) -> Any | None:
        """The matrix `name` if it is here in that shape."""
        ...

    def add(self, name: str, matrix: Any) -> None:
        """Remember a matrix."""
        ...

    def save(self) -> object:
        """Keep what was added for the next start; returns at once."""
        ...


class ReferenceOps:
    """Kernels for one device and activation dtype.

    A layer's KV cache is one tensor [2, kv_heads, slots, head_dim]: K and V, heads outermost, so that the positions of
    one page, and of ascending pages, lie in one piece for each head. Slot = page * PAGE_SIZE + offset.
    """

    name = "torch"
    quantised: ClassVar[bool] = False
    """Products leave quantised weights as they are; else these are rounded, but no smaller."""
    joins: ClassVar[bool] = True
    """Products of several matrices make one of them, which takes their place."""
    tabled: ClassVar[bool] = False
    """Kernels read `Batch.tables`, so that steps come to them in one piece, and can be recorded."""
    records_state: ClassVar[bool] = False
    """Steps that change the state of recurrent layers can be recorded, too."""
    step_bytes: int
    """Bytes of all weights that products were prepared for: what one decode step reads."""
    kv_bits: int
    """Of each number in the KV cache."""
    gathers: bool = True
    """Attention copies the pages that it reads."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.step_bytes = 0
        self.kv_bits = dtype.itemsize * 8

    def store(self, model: Path, quant: str = "") -> MatrixStore | None:
        """Where prepared weights of the model at this path are kept from one start to the next, if anywhere.

        Args:
            quant: what plain weights become; another is another place.
        """
        return None

    def matrix(self, weight: Weight, form: QuantForm | None = None) -> Any:
        """A weight [N, K] as `linear` and `embedding` of these kernels take it.

        Args:
            form: what to quantise it to if it is plain, and if that can be (see `quantize`); it fits K.
        """
        if form is not None and isinstance(weight, Tensor):
            weight = quantize(weight.to(self.device), form) or weight
        return weight.to(self.device) if isinstance(weight, GroupwiseTensor) else weight.to(self.device, self.dtype)

    def linear(self, parts: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Prepare `x -> x @ weight.T + bias` for x of [T, K]; outputs of several matrices lie side by side.

        Args:
            bias: float32, of all outputs together.
            gate: the operator takes x of [T, 2 * K] and multiplies `gate_mul(x, gate)`.
        """
        weight = torch.cat([self.dense(part) for part in parts]) if len(parts) > 1 else self.dense(parts[0])
        self.step_bytes += weight.nbytes
        product = DenseLinear(weight, None if bias is None else bias.to(self.device, self.dtype))
        return GatedLinear(lambda x: self.gate_mul(x, gate), product) if gate else product

    def dense(self, weight: Weight) -> Tensor:
        """The weight as a plain tensor of the activation dtype."""
        if isinstance(weight, GroupwiseTensor):
            weight = weight.dequantize(torch.float32)
        return weight.to(self.device, self.dtype)

    def embedding(self, matrix: Any, tokens: Tensor, factor: float = 1.0) -> Tensor:
        """Rows of a matrix [V, H] for tokens [T], times `factor`, as float32 [T, H]."""
        if isinstance(matrix, GroupwiseTensor):
            return matrix.rows(tokens).dequantize(torch.float32).mul_(factor)
        return F.embedding(tokens, matrix).float() * factor

    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        """Prepare a norm; the weight is [H], float32."""
        return RmsNorm(weight, eps, self.dtype)

    def rope_tables(self, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [T, R / 2], of positions [T] times frequencies [R / 2]; both times `factor`."""
        angles = positions[:, None].float() * frequencies
        return angles.cos().mul_(factor), angles.sin().mul_(factor)

    def rotate_store(
        self,
        qkv: Tensor,
        heads: int,
        rope: tuple[Tensor, Tensor],
        cache: Tensor,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Normalise and rotate queries and keys (Su et al., 2021; halves paired), store keys and values.

        Only the first R numbers of each head are rotated.

        Args:
            qkv: [T, heads + 2 * kv_heads, D]; may be changed.
            rope: see `rope_tables`.
            slots: [T], where this step's K and V go.
            norms: of each head, before the rotation; None does not normalise.

        Returns:
            The rotated queries, [T, heads, D].
        """
        turning = heads + cache.shape[1]
        if norms is not None:
            qkv[:, :heads] = RmsNorm(norms.query, norms.eps, self.dtype)(qkv[:, :heads])
            qkv[:, heads:turning] = RmsNorm(norms.key, norms.eps, self.dtype)(qkv[:, heads:turning])
        cos, sin = (table[:, None] for table in rope)  # [T, 1, R / 2]
        half = cos.shape[-1]
        first, second, rest = qkv[:, :turning].float().split((half, half, qkv.shape[-1] - 2 * half), dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(self.dtype)
        slots = slots.long()
        cache[0].index_copy_(1, slots, rotated[:, heads:].transpose(0, 1))
        cache[1].index_copy_(1, slots, qkv[:, turning:].transpose(0, 1))
        return rotated[:, :heads]

    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        """`gate(first) * second` for the halves of [T, 2 * I]; `gate` is a name in `GATES`."""
        first, second = gate_up.chunk(2, dim=-1)
        return GATES[gate](first) * second

    def mixture(self, experts: Sequence[Expert], routing: Routing, clamp: Clamp | None = None) -> MixtureOp:
        """Prepare a mixture of experts.

        Args:
            clamp: the activation, if it is not silu.
        """
        before = self.step_bytes
        gate_ups = [self.linear(expert.gate_up, expert.gate_up_bias) for expert in experts]
        downs = [self.linear([expert.down], expert.down_bias, "silu") for expert in experts]
        # Of what `linear` counted, a decode step reads the part of those that are chosen.
        self.step_bytes = before + (self.step_bytes - before) * routing.chosen // len(experts)
        return Mixture(routing, gate_ups, downs, clamp)

    def state_bytes(self, sizes: DeltaSizes) -> int:
        """Of what a Gated DeltaNet layer keeps of one sequence."""
        return DeltaRule.state_bytes(sizes)

    def delta_rule(self, sizes: DeltaSizes, weights: DeltaWeights) -> DeltaOp:
        """Prepare what a Gated DeltaNet layer does between its projections."""
        return DeltaRule(sizes, weights, self.rms_norm(weights.norm, weights.eps), self.device)

    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """`out + x * sigmoid(gate)` for out and x of [T, H] and a gate [T, 1]; may change `out`."""
        # On a CPU, the sigmoid of a float32 number depends on how many others are beside it. MPS has no float64.
        wide = gate.float() if self.device.type == "mps" else gate.double()
        return out.add_(x * wide.sigmoid().to(x.dtype))

    def choose_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Rows [S] of x [T, H]."""
        return x[rows]

    def argmax(self, logits: Tensor) -> Tensor:
        """The first of the largest in each row of float32 [S, V], int64 [S]."""
        return logits.argmax(-1)

    def choose(self, logits: Tensor, settings: sampling.Settings) -> Tensor:
        """A token for each row of [S, V], any float dtype (see `sampling.choose`); not waited for."""
        return sampling.choose(logits.float(), settings, self.argmax)

    def choose_of(self, logits: Tensor, masks: sampling.Masks, settings: sampling.Settings) -> list[int]:
        """The same for some rows, of what their masks leave (see `sampling.choose_of`)."""
        return sampling.choose_of(logits.float(), masks, settings)

    def page_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one page of one layer."""
        return 2 * kv_heads * head_dim * PAGE_SIZE * self.dtype.itemsize

    def parts_bytes(self, sequences: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """Bytes of what attention keeps of the parts of sequences, at most, before it is put together."""
        return 0

    def new_cache(self, kv_heads: int, pages: int, head_dim: int) -> Tensor:
        """A zeroed KV cache of one layer. On a CPU its memory becomes resident only as pages are written."""
        shape = (2, kv_heads, pages * PAGE_SIZE, head_dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, device=self.device, dtype=self.dtype)
        size = math.prod(shape) * self.dtype.itemsize
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would make 2 MiB resident for the first token of every head
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)

    def attend(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        """Causal attention of each row over its own sequence's pages; queries and result are [T, heads, D]."""
        out = torch.empty_like(queries)
        for group in batch.decodes:
            out[group.rows] = self._decode(queries[group.rows], cache, group, kind)
        for chunk in batch.chunks:
            out[chunk.rows] = self._prefill(queries[chunk.rows], cache, chunk, kind)
        return out

    def run(self, forward: Callable[[Batch], Tensor], batch: Batch, group: int, recorded: bool = True) -> Tensor:
        """Run a forward pass of a model with `group` query heads per KV head; logits [S, vocabulary].

        Args:
            recorded: what the pass computes depends on nothing but the batch and its shape; it may be recorded and run
                again, and its effects may be repeated.
        """
        return forward(batch)

    def record(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """Record the forward pass of a bucket, if these kernels are `tabled`.

        Args:
            blank: a batch of the bucket's size none of whose rows stands for anything.

        Raises:
            RuntimeError: the pass cannot be recorded.
        """
        raise NotImplementedError

    def forget(self) -> None:
        """Give up what was recorded, and its memory."""

    def _decode(self, queries: Tensor, cache: Tensor, group: DecodeGroup, kind: AttentionKind) -> Tensor:
        rows, heads, dim = queries.shape
        kv_heads = cache.shape[1]
        keys, values = _pages(cache, group.pages, group.contiguous)  # [kv_heads * B, L, D]
        keys, values = keys[:, : group.longest], values[:, : group.longest]
        window = kind.window if kind.window is not None and kind.window < group.longest else None
        if rows == 1 and window is None and kind.sinks is None:
            queries = queries.reshape(1, kv_heads, -1, dim)
            out = F.scaled_dot_product_attention(queries, keys[None], values[None], scale=kind.scale)
            return out.view(1, heads, dim)
        # The query heads of one KV head are the rows of one product.
        grouped = queries.reshape(rows, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads * rows, -1, dim)
        scores = torch.bmm(grouped * kind.scale, keys.transpose(1, 2)).float()
        scores = scores.view(kv_heads, rows, -1, group.longest).add_(group.mask[:, None])
        if window is not None:
            places = torch.arange(group.longest, device=scores.device)
            scores.masked_fill_((places < group.lengths[:, None] - window)[:, None], float("-inf"))
        sinks = None if kind.sinks is None else kind.sinks.view(kv_heads, 1, -1, 1)
        weights = _softmax(scores, sinks).view(kv_heads * rows, -1, group.longest)
        out = torch.bmm(weights.to(values.dtype), values)
        return out.view(kv_heads, rows, -1, dim).transpose(0, 1).reshape(rows, heads, dim)

    def _prefill(self, queries: Tensor, cache: Tensor, chunk: Chunk, kind: AttentionKind) -> Tensor:
        count, heads, _ = queries.shape
        kv_heads, length = cache.shape[1], chunk.prefix + count
        keys, values = _pages(cache, chunk.pages, chunk.contiguous)
        keys = keys[:, :length].repeat_interleave(heads // kv_heads, dim=0)
        values = values[:, :length].repeat_interleave(heads // kv_heads, dim=0)
        queries = queries.transpose(0, 1)
        mask = None
        windowed = kind.window is not None and length > kind.window
        if chunk.prefix or windowed or kind.sinks is not None:
            rows = torch.arange(chunk.prefix, length, device=queries.device)[:, None]
            places = torch.arange(length, device=queries.device)
            mask = places <= rows
            if kind.window is not None:
                mask &= places > rows - kind.window
        if kind.sinks is not None:
            assert mask is not None
            scores = torch.bmm(queries * kind.scale, keys.transpose(1, 2)).float()
            weights = _softmax(scores.masked_fill_(~mask, float("-inf")), kind.sinks.view(-1, 1, 1))
            return torch.bmm(weights.to(values.dtype), values).transpose(0, 1)
        out = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None, scale=kind.scale
        )
        return out[0].transpose(0, 1)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension, with a sink beside the scores or without."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    beside = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return torch.softmax(beside, dim=-1)[..., :-1]


def _pages(cache: Tensor, pages: Tensor, contiguous: int | None) -> tuple[Tensor, Tensor]:
    """K and V of `pages` ([P] or [B, P]), each [kv_heads * B, P * page_size, D]; a view where pages are contiguous."""
    _, heads, _, dim = cache.shape
    width = pages.shape[-1] * PAGE_SIZE
    if contiguous is not None:
        span = cache[:, :, contiguous * PAGE_SIZE : contiguous * PAGE_SIZE + width]
        return span[0], span[1]
    paged = cache.view(2, heads, -1, PAGE_SIZE * dim).index_select(2, pages.flatten())
    return paged[0].view(-1, width, dim), paged[1].view(-1, width, dim)
