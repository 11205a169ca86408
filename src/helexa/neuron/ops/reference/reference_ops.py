"""Kernels in plain torch, which tests compare with all other kernels."""

import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from helexa.neuron.ops import sampling as draws
from helexa.neuron.ops.batch import AttentionKind, Batch
from helexa.neuron.ops.convolution import ConvOp, ConvSizes, ConvWeights, ShortConvolution
from helexa.neuron.ops.gated_delta import DeltaOp, DeltaRule, DeltaSizes, DeltaWeights, wide
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.linear_and_norm_operators import (
    DenseLinear,
    GatedLinear,
    GroupNorm,
    HeadLinear,
    HeadLinearOp,
    HeadNorms,
    LayerNorm,
    LinearOp,
    NormOp,
    ProductBytes,
    RmsNorm,
)
from helexa.neuron.ops.rank_group_and_shares import Exchange, RowRange, Shares
from helexa.neuron.ops.reference.attention import SpanGroups, attend_frames, rotated_by
from helexa.neuron.ops.sampling import Masks, Sampling
from helexa.neuron.ops.state_space import ScanOp, ScanSizes, ScanWeights, StateSpace
from helexa.neuron.processes.heaps_and_shared_memory import prefer_page_size
from helexa.neuron.weights.quantization_formats import QuantFormat
from helexa.neuron.weights.quantize import quantize
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor, Weight

# Activation functions of gated feed-forward layers, by name.
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

# Activation functions, by name.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {**GATES, "gelu": F.gelu, "relu2": lambda x: F.relu(x).square()}


class ReferenceOps(Ops):
    """All kernels in plain torch; `Ops` describes the methods.

    The KV cache of a layer is one tensor [2, kv_heads, slots, head_dim]: keys, then values; or [1, ..] if the keys are
    the values. For each head, the positions of a page are contiguous, and so are pages with consecutive numbers.
    """

    name = "torch"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(
            device,
            dtype,
            kv_bits=dtype.itemsize * 8,
            quantized=False,
            copies_matrices=True,
            fixed_addresses=False,
            captures_state=False,
            copies_pages=True,
        )
        self._grouped: SpanGroups | None = None  # the groups of the latest batch, which all layers use

    def matrix(self, weight: Weight, quant_format: QuantFormat | None = None) -> Any:
        if quant_format is not None and isinstance(weight, Tensor):
            weight = quantize(weight.to(self.device), quant_format) or weight
        return weight.to(self.device) if isinstance(weight, GroupwiseTensor) else weight.to(self.device, self.dtype)

    def linear(self, matrices: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        # Plain torch has no product with quantized weights. The weights are dequantized once, to the activation dtype.
        weight = (
            torch.cat([self.dense(matrix) for matrix in matrices]) if len(matrices) > 1 else self.dense(matrices[0])
        )
        self.step_bytes += weight.nbytes
        product = DenseLinear(weight, None if bias is None else bias.to(self.device, self.dtype))
        return GatedLinear(lambda x: self.gate_mul(x, gate), product) if gate else product

    def head_linear(self, matrices: Sequence[Any]) -> HeadLinearOp:
        weight = torch.stack([self.dense(matrix) for matrix in matrices])
        self.step_bytes += weight.nbytes
        return HeadLinear(weight)

    def matrix_bytes(self, weight: Weight) -> int:
        return weight.nbytes if isinstance(weight, GroupwiseTensor) else self.dense_bytes(weight)

    def product_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        # A single plain weight is used without a copy.
        if len(weights) == 1 and isinstance(weights[0], Tensor):
            return ProductBytes(0)
        return ProductBytes(sum(self.dense_bytes(weight) for weight in weights), dequantizing_bytes(weights))

    def head_linear_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        return ProductBytes(sum(self.dense_bytes(weight) for weight in weights), dequantizing_bytes(weights))

    def dense_bytes(self, weight: Weight) -> int:
        """Return the bytes of the weight as a plain tensor of the activation dtype."""
        return math.prod(weight.shape) * self.dtype.itemsize

    def dense(self, weight: Weight) -> Tensor:
        """Return a plain or quantized weight as a plain tensor of the activation dtype."""
        if isinstance(weight, GroupwiseTensor):
            weight = weight.dequantize(torch.float32)
        return weight.to(self.device, self.dtype)

    def embedding(self, matrix: Any, tokens: Tensor, factor: float = 1.0, rows: RowRange | None = None) -> Tensor:
        if rows is not None:
            inside = (tokens >= rows.start) & (tokens < rows.stop)
            return self.embedding(matrix, (tokens - rows.start).where(inside, 0), factor) * inside[:, None]
        if isinstance(matrix, GroupwiseTensor):
            return matrix.rows(tokens).dequantize(torch.float32).mul_(factor)
        return F.embedding(tokens, matrix).float() * factor

    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        return RmsNorm(weight, eps, self.dtype)

    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float) -> NormOp:
        return LayerNorm(weight, bias, eps, self.dtype)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        return ACTIVATIONS[activation](x)

    def rope_tables(self, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
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
        rotated_heads = min(heads + cache.shape[1], qkv.shape[1])
        values = qkv[:, rotated_heads:] if qkv.shape[1] > rotated_heads else qkv[:, heads:].clone()
        if norms is not None and norms.values:
            values = RmsNorm(torch.ones_like(norms.key), norms.eps, self.dtype)(values)
        if norms is not None and not norms.last:
            qkv[:, :rotated_heads] = self._normed_heads(qkv[:, :rotated_heads], heads, norms)
        rotated = rotated_by(qkv[:, :rotated_heads], rope)
        if norms is not None and norms.last:
            rotated = self._normed_heads(rotated, heads, norms)
        if rotated_heads > heads:
            slots = slots.long()
            cache[0].index_copy_(1, slots, rotated[:, heads:].transpose(0, 1))
            if len(cache) > 1:
                cache[1].index_copy_(1, slots, values.transpose(0, 1))
        return rotated[:, :heads]

    def _normed_heads(self, x: Tensor, heads: int, norms: HeadNorms) -> Tensor:
        queries = RmsNorm(norms.query, norms.eps, self.dtype)(x[:, :heads])
        keys = RmsNorm(norms.key, norms.eps, self.dtype)(x[:, heads:])
        return torch.cat((queries, keys), dim=1)

    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        first, second = gate_up.chunk(2, dim=-1)
        return GATES[gate](first) * second

    def connect(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        assert self.exchange is not None, "several ranks need `connect` before the first forward pass"
        return self.exchange.gather(x, shares)

    def sum_ranks(self, x: Tensor) -> Tensor:
        assert self.exchange is not None, "several ranks need `connect` before the first forward pass"
        first, *others = self.exchange.stack(x)
        total = first.float()
        for partial in others:  # not `torch.sum`, whose order of additions depends on the shape
            total = total + partial
        return total.to(x.dtype)

    def delta_rule(self, sizes: DeltaSizes, weights: DeltaWeights) -> DeltaOp:
        return DeltaRule(sizes, weights, self.rms_norm(weights.norm, weights.eps), self.device)

    def short_convolution(self, sizes: ConvSizes, weights: ConvWeights) -> ConvOp:
        return ShortConvolution(sizes, weights, self.device)

    def scan(self, sizes: ScanSizes, weights: ScanWeights) -> ScanOp:
        return StateSpace(sizes, weights, self.device)

    def group_norm(self, weight: Tensor, groups: int, eps: float) -> Callable[[Tensor], Tensor]:
        return GroupNorm(weight, groups, eps, self.dtype)

    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        return out.add_(x * wide(gate, self.device).sigmoid().to(x.dtype))

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        return out.add_(x)

    def choose_rows(self, x: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
        return x[rows] if out is None else out.copy_(x[rows])

    def sample(self, logits: Tensor, sampling: Sampling, last: Tensor | None = None) -> Tensor:
        return draws.sample(draws.adjusted(logits, sampling.adjustments, last).float(), draws.settings_of(sampling))

    def sample_masked(self, logits: Tensor, masks: Masks, sampling: Sampling, last: Tensor | None = None) -> list[int]:
        settings = draws.settings_of(sampling, again=True)[:, list(masks)]
        return draws.sample_masked(draws.adjusted(logits, sampling.adjustments, last).float(), masks, settings)

    def log_probabilities(
        self, logits: Tensor, tokens: Tensor, alternatives: int, rows: NDArray[np.int32] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return draws.log_probabilities(logits, tokens, alternatives, rows)

    def page_bytes(self, kv_heads: int, head_dim: int, values: bool = True) -> int:
        return (1 + values) * kv_heads * head_dim * PAGE_SIZE * self.dtype.itemsize

    def partials_bytes(self, sequences: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return 0, because attention in plain torch has no partial results."""
        return 0

    def new_cache(self, kv_heads: int, pages: int, head_dim: int, values: bool = True) -> Tensor:
        shape = (1 + values, kv_heads, pages * PAGE_SIZE, head_dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, device=self.device, dtype=self.dtype)
        size = math.prod(shape) * self.dtype.itemsize
        # The operating system allocates physical memory only when a page is first written.
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        prefer_page_size(memory, huge=False)  # a huge page would make 2 MiB resident for the first token of each head
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)

    def attend(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        if self._grouped is None or self._grouped.batch is not batch:
            self._grouped = SpanGroups(batch)
        return self._grouped.attend(queries, cache, kind)

    def attend_frames(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None, lengths: tuple[int, ...], scale: float
    ) -> Tensor:
        return attend_frames(qkv, rope, lengths, scale)

    def run(self, forward: Callable[[Batch], Tensor], batch: Batch, capture: bool = True) -> Tensor:
        return forward(batch)

    def capture(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """Raise NotImplementedError, because these kernels cannot be captured as graphs."""
        raise NotImplementedError

    def forget(self) -> None:
        """Do nothing, because these kernels have no captured graphs."""


def dequantizing_bytes(weights: Sequence[Weight]) -> int:
    """Return the bytes of the largest quantized weight in float32; 0 without any."""
    # The weights are dequantized one after another, so only one float32 copy exists at a time.
    return max((math.prod(weight.shape) * 4 for weight in weights if isinstance(weight, GroupwiseTensor)), default=0)
