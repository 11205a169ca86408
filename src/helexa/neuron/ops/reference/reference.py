"""Plain-torch kernels: correct on every device, and the oracle for all other kernels."""

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
from helexa.neuron.ops.norm import HeadNorms, NormOp, RmsNorm
from helexa.neuron.ops.protocol import MatrixStore, Ops
from helexa.neuron.ops.ranks.exchange import Exchange
from helexa.neuron.ops.ranks.shares import RowRange, Shares
from helexa.neuron.ops.reference.attention import SpanGroups
from helexa.neuron.weights.formats import GroupwiseTensor, Weight
from helexa.neuron.weights.quantization.quant_form import QuantForm
from helexa.neuron.weights.quantization.quantize import quantize

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
"""Activation functions of gates by name."""


class ReferenceOps(Ops):
    """The kernels in plain torch.

    A layer's KV cache is one tensor [2, kv_heads, slots, head_dim] with K and V. The positions of one page, and of
    ascending pages, are contiguous for each head. On a CPU the memory becomes resident only as pages are written.
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
        self._grouped: SpanGroups | None = None  # of the latest batch: all layers share it
        self._exchange: Exchange | None = None

    def store(self, model: Path, quant: str = "") -> MatrixStore | None:
        """Return the store that keeps the model's prepared weights between starts, or None."""
        return None

    def matrix(self, weight: Weight, form: QuantForm | None = None) -> Any:
        """Prepare a weight [N, K] for `linear` and `embedding`."""
        if form is not None and isinstance(weight, Tensor):
            weight = quantize(weight.to(self.device), form) or weight
        return weight.to(self.device) if isinstance(weight, GroupwiseTensor) else weight.to(self.device, self.dtype)

    def linear(self, matrices: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Prepare `x -> x @ weight.T + bias`; the outputs of several matrices are concatenated."""
        weight = (
            torch.cat([self.dense(matrix) for matrix in matrices]) if len(matrices) > 1 else self.dense(matrices[0])
        )
        self.step_bytes += weight.nbytes
        product = DenseLinear(weight, None if bias is None else bias.to(self.device, self.dtype))
        return GatedLinear(lambda x: self.gate_mul(x, gate), product) if gate else product

    def matrix_bytes(self, weight: Weight) -> int:
        """Return the size in bytes of the matrix that `matrix()` builds from a weight [N, K]."""
        return weight.nbytes if isinstance(weight, GroupwiseTensor) else self.dense_bytes(weight)

    def product_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        """Return the bytes that `linear` or `mixture` allocates for these weights."""
        if len(weights) == 1 and isinstance(weights[0], Tensor):
            return ProductBytes(0)
        return ProductBytes(sum(self.dense_bytes(weight) for weight in weights), dequantizing_bytes(weights))

    def dense_bytes(self, weight: Weight) -> int:
        """Return the bytes of the result of `dense`."""
        return weight.shape.numel() * self.dtype.itemsize

    def dense(self, weight: Weight) -> Tensor:
        """Return the weight as a plain tensor of the activation dtype."""
        if isinstance(weight, GroupwiseTensor):
            weight = weight.dequantize(torch.float32)
        return weight.to(self.device, self.dtype)

    def embedding(self, matrix: Any, tokens: Tensor, factor: float = 1.0, rows: RowRange | None = None) -> Tensor:
        """Return the rows of a matrix [V, H] for tokens [T], times `factor`, as float32 [T, H].

        Tokens outside `rows` get zeros.
        """
        if rows is not None:
            inside = (tokens >= rows.start) & (tokens < rows.stop)
            return self.embedding(matrix, (tokens - rows.start).where(inside, 0), factor) * inside[:, None]
        if isinstance(matrix, GroupwiseTensor):
            return matrix.rows(tokens).dequantize(torch.float32).mul_(factor)
        return F.embedding(tokens, matrix).float() * factor

    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        """Prepare an RMS norm with a weight [H], float32."""
        return RmsNorm(weight, eps, self.dtype)

    def rope_tables(self, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return cos and sin, float32 [T, R / 2], of positions [T] times frequencies [R / 2]."""
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
        """Normalize and rotate queries and keys, store keys and values in the cache, and return the queries."""
        rotated_heads = heads + cache.shape[1]
        if norms is not None:
            qkv[:, :heads] = RmsNorm(norms.query, norms.eps, self.dtype)(qkv[:, :heads])
            qkv[:, heads:rotated_heads] = RmsNorm(norms.key, norms.eps, self.dtype)(qkv[:, heads:rotated_heads])
        cos, sin = (table[:, None] for table in rope)  # [T, 1, R / 2]
        half = cos.shape[-1]
        first, second, unrotated = qkv[:, :rotated_heads].float().split((half, half, qkv.shape[-1] - 2 * half), dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, unrotated), dim=-1).to(self.dtype)
        slots = slots.long()
        cache[0].index_copy_(1, slots, rotated[:, heads:].transpose(0, 1))
        cache[1].index_copy_(1, slots, qkv[:, rotated_heads:].transpose(0, 1))
        return rotated[:, :heads]

    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        """Return `gate(first) * second` for the halves of [T, 2 * I]; `gate` is a name in `GATES`."""
        first, second = gate_up.chunk(2, dim=-1)
        return GATES[gate](first) * second

    def connect(self, exchange: Exchange) -> None:
        """Set how this rank exchanges results with the other ranks."""
        self._exchange = exchange

    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        """Return the columns of all ranks, [T, `shares.total`], from this rank's columns x [T, own columns]."""
        assert self._exchange is not None, "the ranks are not connected"
        return self._exchange.gather(x, shares)

    def sum_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of x [T, H] over all ranks, added in the order of the ranks."""
        whole = Shares.split(self.ranks.count, self.ranks.count, self.ranks.rank).times(x.shape[1])
        return self.gather(x, whole).view(x.shape[0], self.ranks.count, -1).sum(dim=1)

    def mixture(
        self,
        experts: Sequence[Expert],
        routing: Routing,
        clamp: Clamp | None = None,
        shares: ExpertShares | None = None,
    ) -> MixtureOp:
        """Prepare a mixture of experts."""
        return expert_by_expert(self, experts, routing, clamp, shares)

    def state_bytes(self, sizes: DeltaSizes) -> int:
        """Return the bytes of one sequence's state in a Gated DeltaNet layer."""
        return DeltaRule.state_bytes(sizes)

    def delta_rule(self, sizes: DeltaSizes, weights: DeltaWeights) -> DeltaOp:
        """Prepare the operator between the projections of a Gated DeltaNet layer."""
        return DeltaRule(sizes, weights, self.rms_norm(weights.norm, weights.eps), self.device)

    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """Return `out + x * sigmoid(gate)` for out and x [T, H] and gate [T, 1]; may change `out`."""
        # On a CPU, the sigmoid of a float32 number depends on the number of elements. MPS has no float64.
        wide = gate.float() if self.device.type == "mps" else gate.double()
        return out.add_(x * wide.sigmoid().to(x.dtype))

    def choose_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return rows [S] of x [T, H]."""
        return x[rows]

    def choose(self, logits: Tensor, settings: sampling.Settings) -> Tensor:
        """Return a token for each row of logits [S, V], without waiting."""
        return sampling.choose(logits.float(), settings, sampling.argmax)

    def choose_masked(self, logits: Tensor, masks: sampling.Masks, settings: sampling.Settings) -> list[int]:
        """Return a token for each masked row, among the tokens that its mask allows."""
        return sampling.choose_masked(logits.float(), masks, settings)

    def page_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Return the bytes of one KV page in one layer."""
        return 2 * kv_heads * head_dim * PAGE_SIZE * self.dtype.itemsize

    def partials_bytes(self, sequences: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return the maximum bytes of attention's partial results before they are merged."""
        return 0

    def new_cache(self, kv_heads: int, pages: int, head_dim: int) -> Tensor:
        """Return a zeroed KV cache of one layer."""
        shape = (2, kv_heads, pages * PAGE_SIZE, head_dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, device=self.device, dtype=self.dtype)
        size = math.prod(shape) * self.dtype.itemsize
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would make 2 MiB resident for the first token of each head
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)

    def attend(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        """Return the causal attention of each row over its own sequence's pages, [T, heads, D]."""
        if self._grouped is None or self._grouped.batch is not batch:
            self._grouped = SpanGroups(batch)
        return self._grouped.attend(queries, cache, kind)

    def run(self, forward: Callable[[Batch], Tensor], batch: Batch, capture: bool = True) -> Tensor:
        """Run a forward pass and return the logits [S, vocabulary]."""
        return forward(batch)

    def capture(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """Capture the forward pass of a bucket; `blank` contains only padding rows."""
        raise NotImplementedError

    def forget(self) -> None:
        """Release all captured graphs and their memory."""


def dequantizing_bytes(weights: Sequence[Weight]) -> int:
    """Return the maximum temporary float32 bytes for dequantizing one of the weights."""
    return max((weight.shape.numel() * 4 for weight in weights if isinstance(weight, GroupwiseTensor)), default=0)
