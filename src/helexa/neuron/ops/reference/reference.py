"""Plain-torch kernels, which work on every device. Tests compare all other kernels with them."""

import math
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helexa.neuron.ops import sampling
from helexa.neuron.ops.attention_kind import AttentionKind
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.constants import PAGE_SIZE
from helexa.neuron.ops.delta.delta_rule import DeltaOp, DeltaRule, DeltaSizes, DeltaWeights
from helexa.neuron.ops.expert_by_expert import expert_by_expert
from helexa.neuron.ops.linear import DenseLinear, GatedLinear, LinearOp, ProductBytes
from helexa.neuron.ops.mixture import Clamp, Expert, ExpertShares, MixtureOp, Routing
from helexa.neuron.ops.norm import HeadNorms, LayerNorm, NormOp, RmsNorm
from helexa.neuron.ops.protocol import MatrixStore, Ops
from helexa.neuron.ops.ranks.exchange import Exchange
from helexa.neuron.ops.ranks.shares import RowRange, Shares
from helexa.neuron.ops.reference.attention import SpanGroups
from helexa.neuron.ops.reference.frame_attention import attend_frames, rotated_by
from helexa.neuron.ops.wide import wide
from helexa.neuron.weights.formats import GroupwiseTensor, Weight
from helexa.neuron.weights.quantization.quant_form import QuantForm
from helexa.neuron.weights.quantization.quantize import quantize

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
"""Activation functions of gated feed-forward layers, by name."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {**GATES, "gelu": F.gelu}
"""Activation functions, by name."""


class ReferenceOps(Ops):
    """All kernels in plain torch.

    The KV cache of a layer is one tensor [2, kv_heads, slots, head_dim]: keys, then values. For each head, the
    positions of a page are contiguous, and so are pages with consecutive numbers.
    """

    name = "torch"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(
            device,
            dtype,
            kv_bits=dtype.itemsize * 8,
            quantised=False,
            joins=True,
            tabled=False,
            captures_state=False,
            gathers=True,
        )
        self._grouped: SpanGroups | None = None  # the groups of the latest batch, which all layers use

    def store(self, model: Path, quant: str = "", part: str = "") -> MatrixStore | None:
        """Return None, because these kernels do not store prepared weights on disk."""
        return None

    def matrix(self, weight: Weight, form: QuantForm | None = None) -> Any:
        """Return a weight [N, K] on the device, quantized or as a tensor of the activation dtype (see `Ops.matrix`)."""
        if form is not None and isinstance(weight, Tensor):
            weight = quantize(weight.to(self.device), form) or weight
        return weight.to(self.device) if isinstance(weight, GroupwiseTensor) else weight.to(self.device, self.dtype)

    def linear(self, matrices: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Return an operator that computes `x @ weight.T + bias` for inputs x [T, K] (see `Ops.linear`).

        The operator stores the weights dequantized, in the activation dtype.
        """
        weight = (
            torch.cat([self.dense(matrix) for matrix in matrices]) if len(matrices) > 1 else self.dense(matrices[0])
        )
        self.step_bytes += weight.nbytes
        product = DenseLinear(weight, None if bias is None else bias.to(self.device, self.dtype))
        return GatedLinear(lambda x: self.gate_mul(x, gate), product) if gate else product

    def matrix_bytes(self, weight: Weight) -> int:
        """Return the number of bytes of the matrix that `matrix()` builds from a weight [N, K]."""
        return weight.nbytes if isinstance(weight, GroupwiseTensor) else self.dense_bytes(weight)

    def product_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        """Return the number of bytes that `linear` or `mixture` allocates in addition to the given weights.

        A single plain weight is used without a copy. Other weights are copied, and dequantized if they are quantized.
        """
        if len(weights) == 1 and isinstance(weights[0], Tensor):
            return ProductBytes(0)
        return ProductBytes(sum(self.dense_bytes(weight) for weight in weights), dequantizing_bytes(weights))

    def dense_bytes(self, weight: Weight) -> int:
        """Return the number of bytes of the weight as a plain tensor of the activation dtype."""
        return weight.shape.numel() * self.dtype.itemsize

    def dense(self, weight: Weight) -> Tensor:
        """Return a plain or quantized weight as a plain tensor of the activation dtype."""
        if isinstance(weight, GroupwiseTensor):
            weight = weight.dequantize(torch.float32)
        return weight.to(self.device, self.dtype)

    def embedding(self, matrix: Any, tokens: Tensor, factor: float = 1.0, rows: RowRange | None = None) -> Tensor:
        """Return the embeddings of T tokens: rows of a matrix [V, H], times `factor`, as float32 [T, H].

        Token ids outside the range `rows` get zeros.
        """
        if rows is not None:
            inside = (tokens >= rows.start) & (tokens < rows.stop)
            return self.embedding(matrix, (tokens - rows.start).where(inside, 0), factor) * inside[:, None]
        if isinstance(matrix, GroupwiseTensor):
            return matrix.rows(tokens).dequantize(torch.float32).mul_(factor)
        return F.embedding(tokens, matrix).float() * factor

    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        """Return an operator that computes the RMS norm with a float32 weight [H]."""
        return RmsNorm(weight, eps, self.dtype)

    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float) -> NormOp:
        """Return an operator that computes the layer norm with a float32 weight [H] and bias [H]."""
        return LayerNorm(weight, bias, eps, self.dtype)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Return the activation of each number of x [T, I]. `activation` is `silu`, `gelu_tanh` or `gelu`."""
        return ACTIVATIONS[activation](x)

    def rope_tables(self, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the RoPE tables: cos and sin of positions [T] times frequencies [R / 2], both float32 [T, R / 2]."""
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
        """Apply norms and RoPE to queries and keys, and write keys and values to the KV cache (see `Ops.rotate_store`).

        Returns:
            The rotated queries, [T, heads, D].
        """
        rotated_heads = heads + cache.shape[1]
        if norms is not None:
            qkv[:, :heads] = RmsNorm(norms.query, norms.eps, self.dtype)(qkv[:, :heads])
            qkv[:, heads:rotated_heads] = RmsNorm(norms.key, norms.eps, self.dtype)(qkv[:, heads:rotated_heads])
        rotated = rotated_by(qkv[:, :rotated_heads], rope)
        slots = slots.long()
        cache[0].index_copy_(1, slots, rotated[:, heads:].transpose(0, 1))
        cache[1].index_copy_(1, slots, qkv[:, rotated_heads:].transpose(0, 1))
        return rotated[:, :heads]

    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        """Return `gate(first half) * second half` of `gate_up` [T, 2 * I]. `gate` is `silu` or `gelu_tanh`."""
        first, second = gate_up.chunk(2, dim=-1)
        return GATES[gate](first) * second

    def connect(self, exchange: Exchange) -> None:
        """Set how this rank exchanges results with the other ranks that compute the model."""
        self.exchange = exchange

    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        """Return the columns of all ranks, [T, `shares.total`], from this rank's columns x (all-gather)."""
        assert self.exchange is not None, "the ranks are not connected"
        return self.exchange.gather(x, shares)

    def sum_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of x [T, H] over all ranks (all-reduce), added in the order of the ranks."""
        assert self.exchange is not None, "the ranks are not connected"
        first, *others = self.exchange.stack(x)
        total = first.float()
        for partial in others:  # `sum` would add in an order that depends on the shape
            total = total + partial
        return total.to(x.dtype)

    def mixture(
        self,
        experts: Sequence[Expert],
        routing: Routing,
        clamp: Clamp | None = None,
        shares: ExpertShares | None = None,
    ) -> MixtureOp:
        """Return an operator that computes a mixture of experts, one expert after another."""
        return expert_by_expert(self, experts, routing, clamp, shares)

    def state_bytes(self, sizes: DeltaSizes) -> int:
        """Return the number of bytes of one sequence's recurrent state in a Gated DeltaNet layer of these sizes."""
        return sizes.state_bytes

    def delta_rule(self, sizes: DeltaSizes, weights: DeltaWeights) -> DeltaOp:
        """Return an operator that computes a Gated DeltaNet layer without its input and output projections."""
        return DeltaRule(sizes, weights, self.rms_norm(weights.norm, weights.eps), self.device)

    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """Return `out + x * sigmoid(gate)` for out and x [T, H] and gate [T, 1]; changes `out` in place."""
        return out.add_(x * wide(gate, self.device).sigmoid().to(x.dtype))

    def choose_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return the S rows of x [T, H] with the indexes `rows` [S], as [S, H]."""
        return x[rows]

    def choose(self, logits: Tensor, settings: sampling.Settings) -> Tensor:
        """Return a sampled token for each row of logits [S, V] (see `sampling.choose`)."""
        return sampling.choose(logits.float(), settings, sampling.argmax)

    def choose_masked(self, logits: Tensor, masks: sampling.Masks, settings: sampling.Settings) -> list[int]:
        """Return a sampled token for each row of `logits` that has a mask, among the tokens that the mask allows."""
        return sampling.choose_masked(logits.float(), masks, settings)

    def page_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Return the number of bytes of one KV page in one layer."""
        return 2 * kv_heads * head_dim * PAGE_SIZE * self.dtype.itemsize

    def partials_bytes(self, sequences: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return 0, because attention in plain torch does not divide a sequence into partial results."""
        return 0

    def new_cache(self, kv_heads: int, pages: int, head_dim: int) -> Tensor:
        """Return a zeroed KV cache with `pages` pages for one layer.

        On a CPU, the operating system allocates physical memory only when a page is first written.
        """
        shape = (2, kv_heads, pages * PAGE_SIZE, head_dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, device=self.device, dtype=self.dtype)
        size = math.prod(shape) * self.dtype.itemsize
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would make 2 MiB resident for the first token of each head
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)

    def attend(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        """Return the causal attention output [T, heads, D] of queries [T, heads, D] over their sequences' KV pages."""
        if self._grouped is None or self._grouped.batch is not batch:
            self._grouped = SpanGroups(batch)
        return self._grouped.attend(queries, cache, kind)

    def attend_frames(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None, lengths: tuple[int, ...], scale: float
    ) -> Tensor:
        """Return the attention output [T, heads, D], in which each row attends to all rows of its frame.

        Args:
            qkv: [T, 3 * heads, D], the query heads, key heads and value heads of each row.
            rope: cos and sin tables [T, R / 2] to rotate queries and keys by; None for no rotation.
            lengths: number of rows of each frame.
            scale: factor on the products of queries and keys.
        """
        return attend_frames(qkv, rope, lengths, scale)

    def run(self, forward: Callable[[Batch], Tensor], batch: Batch, capture: bool = True) -> Tensor:
        """Run a forward pass without graph capture, and return its result, usually logits [S, V]."""
        return forward(batch)

    def capture(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """Raise NotImplementedError, because these kernels cannot be captured as graphs."""
        raise NotImplementedError

    def forget(self) -> None:
        """Do nothing, because these kernels have no captured graphs."""


def dequantizing_bytes(weights: Sequence[Weight]) -> int:
    """Return the number of bytes of the largest quantized weight in float32; 0 if no weight is quantized.

    Dequantizing the weights one after another needs this number of temporary bytes.
    """
    return max((weight.shape.numel() * 4 for weight in weights if isinstance(weight, GroupwiseTensor)), default=0)
