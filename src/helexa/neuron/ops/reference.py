"""The kernels in plain torch: right on every device, the oracle for all others."""

import math
import mmap

import torch
import torch.nn.functional as F
from torch import Tensor

from helexa.neuron.engine.batch import Batch, Chunk, DecodeGroup
from helexa.neuron.ops.linear import DenseLinear, LinearOp
from helexa.neuron.ops.norm import NormOp, RmsNorm
from helexa.neuron.weights.formats import GroupwiseTensor, Weight


class ReferenceOps:
    """Kernels for one device and activation dtype.

    A layer's KV cache is one tensor [2, kv_heads, slots, head_dim]: K and V, heads outermost, so that the positions of
    one page, and of ascending pages, lie in one piece for each head. Slot = page * page_size + offset.
    """

    name = "torch"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def linear(self, weight: Weight, bias: Tensor | None) -> LinearOp:
        """Prepare `x -> x @ weight.T + bias` for x of [T, K]; the weight is [N, K]."""
        return DenseLinear(self.dense(weight), None if bias is None else bias.to(self.device, self.dtype))

    def dense(self, weight: Weight) -> Tensor:
        """The weight as a plain tensor of the activation dtype."""
        if isinstance(weight, GroupwiseTensor):
            weight = weight.dequantize(torch.float32)
        return weight.to(self.device, self.dtype)

    def embedding(self, weight: Weight, tokens: Tensor) -> Tensor:
        """Rows of `weight` [V, H] for tokens [T], as float32 [T, H]."""
        if isinstance(weight, GroupwiseTensor):
            return weight.rows(tokens).dequantize(torch.float32)
        return F.embedding(tokens, weight).float()

    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        """Prepare a norm; the weight is [H], float32."""
        return RmsNorm(weight, eps, self.dtype)

    def rotate_store(self, qkv: Tensor, heads: int, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        """Rotate queries and keys (Su et al., 2021; halves paired), store keys and values at `slots` [T].

        Args:
            qkv: [T, heads + 2 * kv_heads, D]; may be changed.
            cos, sin: see `Rope.tables`.

        Returns:
            The rotated queries, [T, heads, D].
        """
        kv_heads = cache.shape[1]
        turning = qkv[:, : heads + kv_heads].float()
        swapped = turning.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        rotated = torch.addcmul(turning * cos, swapped, sin).to(self.dtype)
        cache[0].index_copy_(1, slots, rotated[:, heads:].transpose(0, 1))
        cache[1].index_copy_(1, slots, qkv[:, heads + kv_heads :].transpose(0, 1))
        return rotated[:, :heads]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` for [T, 2 * I], gate first."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def new_cache(self, kv_heads: int, slots: int, head_dim: int) -> Tensor:
        """A zeroed KV cache of one layer. On a CPU its memory becomes resident only as pages are written."""
        shape = (2, kv_heads, slots, head_dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, device=self.device, dtype=self.dtype)
        memory = mmap.mmap(-1, math.prod(shape) * self.dtype.itemsize)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would make 2 MiB resident for the first token of every head
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)

    def attend(self, queries: Tensor, cache: Tensor, page_size: int, batch: Batch) -> Tensor:
        """Causal attention of each row over its own sequence's pages; queries and result are [T, heads, D]."""
        parts = [self._decode(queries[group.rows], cache, page_size, group) for group in batch.decodes]
        parts += [self._prefill(queries[chunk.rows], cache, page_size, chunk) for chunk in batch.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, queries: Tensor, cache: Tensor, page_size: int, group: DecodeGroup) -> Tensor:
        rows, heads, dim = queries.shape
        kv_heads = cache.shape[1]
        keys, values = _pages(cache, page_size, group.pages, group.contiguous)  # [kv_heads * B, L, D]
        keys, values = keys[:, : group.longest], values[:, : group.longest]
        if rows == 1:
            queries = queries.reshape(1, kv_heads, -1, dim)
            return F.scaled_dot_product_attention(queries, keys[None], values[None]).view(1, heads, dim)
        # The query heads of one KV head are the rows of one product.
        grouped = queries.reshape(rows, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads * rows, -1, dim)
        scores = torch.bmm(grouped * dim**-0.5, keys.transpose(1, 2)).float()
        scores.view(kv_heads, rows, -1, group.longest).add_(group.mask[:, None])
        out = torch.bmm(torch.softmax(scores, dim=-1).to(values.dtype), values)
        return out.view(kv_heads, rows, -1, dim).transpose(0, 1).reshape(rows, heads, dim)

    def _prefill(self, queries: Tensor, cache: Tensor, page_size: int, chunk: Chunk) -> Tensor:
        count, heads, _ = queries.shape
        kv_heads, length = cache.shape[1], chunk.prefix + count
        keys, values = _pages(cache, page_size, chunk.pages, chunk.contiguous)
        keys = keys[:, :length].repeat_interleave(heads // kv_heads, dim=0)
        values = values[:, :length].repeat_interleave(heads // kv_heads, dim=0)
        mask = None
        if chunk.prefix:
            rows = torch.arange(chunk.prefix, length, device=queries.device)
            mask = torch.arange(length, device=queries.device) <= rows[:, None]
        out = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None
        )
        return out[0].transpose(0, 1)


def _pages(cache: Tensor, page_size: int, pages: Tensor, contiguous: int | None) -> tuple[Tensor, Tensor]:
    """K and V of `pages` ([P] or [B, P]), each [kv_heads * B, P * page_size, D]; a view where pages are contiguous."""
    _, heads, _, dim = cache.shape
    width = pages.shape[-1] * page_size
    if contiguous is not None:
        span = cache[:, :, contiguous * page_size : contiguous * page_size + width]
        return span[0], span[1]
    paged = cache.view(2, heads, -1, page_size * dim).index_select(2, pages.flatten())
    return paged[0].view(-1, width, dim), paged[1].view(-1, width, dim)
