"""Operators for GPUs: Triton for most operations, plain torch for the others."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helexa.neuron.ops.batch import AttentionKind, Batch
from helexa.neuron.ops.convolution import ConvOp, ConvSizes, ConvWeights, ShortConvolution
from helexa.neuron.ops.expert_routing_and_mixture import WITHOUT_GATE, Clamp, Expert, ExpertShares, MixtureOp, Routing
from helexa.neuron.ops.gated_delta import DeltaOp, DeltaSizes, DeltaWeights
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.linear_and_norm_operators import (
    ConcatenatedLinear,
    DenseLinear,
    GatedLinear,
    HeadLinear,
    HeadLinearOp,
    HeadNorms,
    LinearOp,
    NormOp,
    ProductBytes,
)
from helexa.neuron.ops.rank_group_and_shares import Exchange, RowRange, Shares
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.ops.sampling import Masks, Sampling, adjusted, log_probabilities, settings_of
from helexa.neuron.ops.state_space import ScanOp, ScanSizes, ScanWeights, StateSpace
from helexa.neuron.ops.triton import attention, frame_attention, kv_cache
from helexa.neuron.ops.triton import sampling as draws
from helexa.neuron.ops.triton.delta_rule import DeltaRule
from helexa.neuron.ops.triton.dequantize import dequantize, dequantize_rows
from helexa.neuron.ops.triton.kv_cache import rotate_store
from helexa.neuron.ops.triton.launch_and_graphs import CudaCapture, GpuProperties, StepGraphs, without_capture
from helexa.neuron.ops.triton.linear import SCRATCH_BYTES, PackedLinear
from helexa.neuron.ops.triton.mixture import GpuMixture, stacked
from helexa.neuron.ops.triton.norms_and_gates import LayerNorm, RmsNorm, activate, gate_mul
from helexa.neuron.ops.triton.packed_weights import PackedMatrix, pack, packed_bytes
from helexa.neuron.weights.quantization_formats import QuantFormat
from helexa.neuron.weights.quantize import quantize
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor, Weight


class GpuOps(Ops):
    """Kernels for a CUDA device, or for a CPU with Triton's interpreter.

    `Ops` describes the methods.

    Args:
        kv_bits: 8 for an 8-bit KV cache. For other values, and if plain torch computes the attention of prompts (see
            `Ops.copies_pages`), the numbers in the cache have the dtype `dtype`. So do the numbers in a cache without
            values, or of heads that are too wide for the Triton kernels.
        gpu: properties of the GPU for which tile shapes are selected; None to use the properties of `device`.
    """

    name = "triton"

    def __init__(
        self, device: torch.device, dtype: torch.dtype, kv_bits: int = 16, gpu: GpuProperties | None = None
    ) -> None:
        self.gpu = gpu or GpuProperties.from_device(device)
        # Plain torch computes the attention of prompts if Triton would compute it without tensor cores.
        copies_pages = not (self.gpu.tensor_cores and (dtype.itemsize == 2 or device.type != "cuda"))
        super().__init__(
            device,
            dtype,
            kv_bits=8 if kv_bits == 8 and not copies_pages else dtype.itemsize * 8,
            quantized=True,
            copies_matrices=True,
            fixed_addresses=True,
            captures_state=True,
            copies_pages=copies_pages,
        )
        self._torch = ReferenceOps(device, dtype)
        self._graphs = StepGraphs(CudaCapture() if device.type == "cuda" else without_capture)

    def capture(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        self._graphs.capture(forward, blank)

    def forget(self) -> None:
        self._graphs.forget()

    def run(self, forward: Callable[[Batch], Tensor], batch: Batch, capture: bool = True) -> Tensor:
        return self._graphs.run(forward, batch)

    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        return RmsNorm(weight, eps, self.dtype)

    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float) -> NormOp:
        return LayerNorm(weight, bias, eps, self.dtype)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        return activate(x, activation)

    def matrix(self, weight: Weight, quant_format: QuantFormat | None = None) -> Tensor | PackedMatrix:
        if quant_format is not None and isinstance(weight, Tensor):
            weight = quantize(weight.to(self.device), quant_format) or weight
        # A plain tensor is the result for a shape or group size that the Triton kernels do not support.
        packed = pack(weight.to(self.device)) if isinstance(weight, GroupwiseTensor) else None
        return packed or self._torch.dense(weight)

    def linear(self, matrices: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        packed = [isinstance(matrix, PackedMatrix) for matrix in matrices]
        shift = None if bias is None else bias.to(self.device, self.dtype)
        if all(packed):
            product = PackedLinear(matrices, bias, self._scratch, self.gpu)
            self.step_bytes += product.nbytes
        elif any(packed):
            product = ConcatenatedLinear([self.linear([matrix], None) for matrix in matrices], shift)
        else:
            # cuBLAS computes products with plain matrices.
            weight = torch.cat([*matrices]) if len(matrices) > 1 else matrices[0]
            product = DenseLinear(weight, shift)
            self.step_bytes += weight.nbytes
        return GatedLinear(lambda x: self.gate_mul(x, gate), product) if gate else product

    def head_linear(self, matrices: Sequence[Any]) -> HeadLinearOp:
        weight = torch.stack([self.dense(matrix) for matrix in matrices])
        self.step_bytes += weight.nbytes
        return HeadLinear(weight)

    def matrix_bytes(self, weight: Weight) -> int:
        packed = packed_bytes(weight) if isinstance(weight, GroupwiseTensor) else None
        return self._torch.dense_bytes(weight) if packed is None else packed

    def product_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        # Several weights are copied into one matrix. A single weight is used without a copy.
        return ProductBytes(sum(self.matrix_bytes(weight) for weight in weights) if len(weights) > 1 else 0)

    def head_linear_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        return ProductBytes(sum(self._torch.dense_bytes(weight) for weight in weights))

    def connect(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._torch.ranks = self.ranks
        self._torch.connect(exchange)

    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        return self._torch.gather(x, shares)

    def sum_ranks(self, x: Tensor) -> Tensor:
        return self._torch.sum_ranks(x)

    def mixture(
        self,
        experts: Sequence[Expert],
        routing: Routing,
        clamp: Clamp | None = None,
        shares: ExpertShares | None = None,
        act: str = "silu",
    ) -> MixtureOp:
        # Matrices of different formats are dequantized first, so that the kernels can use them as one matrix. The
        # operator runs one expert after another if the experts are divided among ranks or have no gate, or if the
        # kernels do not support the shape of the matrices.
        if shares is not None or act == WITHOUT_GATE:
            return super().mixture(experts, routing, clamp, shares, act)
        gate_ups, downs = (
            [matrix for expert in experts for matrix in expert.gate_up],
            [expert.down for expert in experts],
        )
        gate_up, down = self._stacked(gate_ups), self._stacked(downs)
        if gate_up is None or down is None:
            return super().mixture(experts, routing, clamp, None, act)
        self.step_bytes += (gate_up.nbytes + down.nbytes) * routing.top_k // len(experts)
        biases = _joined([e.gate_up_bias for e in experts]), _joined([e.down_bias for e in experts])
        return GpuMixture(len(experts), gate_up, down, biases, routing, clamp, self.dtype, self.gpu, act)

    def dense(self, weight: Weight | PackedMatrix) -> Tensor:
        """Return a weight in any format as a plain tensor of the activation dtype."""
        if not isinstance(weight, PackedMatrix):
            return self._torch.dense(weight)
        out = torch.empty(weight.shape, dtype=self.dtype, device=self.device)
        dequantize(weight, 0, out)
        return out

    def embedding(self, matrix: Any, tokens: Tensor, factor: float = 1.0, rows: RowRange | None = None) -> Tensor:
        if not isinstance(matrix, PackedMatrix):
            return self._torch.embedding(matrix, tokens, factor, rows)
        if rows is not None:
            inside = (tokens >= rows.start) & (tokens < rows.stop)
            return self.embedding(matrix, (tokens - rows.start).where(inside, 0), factor) * inside[:, None]
        out = torch.empty((tokens.shape[0], matrix.shape[1]), dtype=torch.float32, device=self.device)
        dequantize_rows(matrix, tokens, factor, out)
        return out

    def _stacked(self, matrices: Sequence[Any]) -> PackedMatrix | Tensor | None:
        packed = stacked(matrices)
        return stacked([self.dense(matrix) for matrix in matrices]) if packed is None else packed

    @cached_property
    def _scratch(self) -> Tensor:
        return torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self.device)

    def sample(self, logits: Tensor, sampling: Sampling, last: Tensor | None = None) -> Tensor:
        return draws.sample(adjusted(logits, sampling.adjustments, last), settings_of(sampling))

    def sample_masked(self, logits: Tensor, masks: Masks, sampling: Sampling, last: Tensor | None = None) -> list[int]:
        settings = settings_of(sampling, again=True)[:, list(masks)]
        return draws.sample(draws.masked(adjusted(logits, sampling.adjustments, last), masks), settings).tolist()

    def log_probabilities(
        self, logits: Tensor, tokens: Tensor, alternatives: int, rows: NDArray[np.int32] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return log_probabilities(logits, tokens, alternatives, rows)

    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        return self._torch.add_gated(out, x, gate)

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        return self._torch.add(out, x)

    def choose_rows(self, x: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
        return x[rows] if out is None else out.copy_(x[rows])

    def state_bytes(self, sizes: DeltaSizes | ConvSizes | ScanSizes) -> int:
        return DeltaRule.state_bytes(sizes, self.dtype) if isinstance(sizes, DeltaSizes) else sizes.state_bytes

    def delta_rule(self, sizes: DeltaSizes, weights: DeltaWeights) -> DeltaOp:
        return DeltaRule(sizes, weights, self.dtype, self.gpu)

    def short_convolution(self, sizes: ConvSizes, weights: ConvWeights) -> ConvOp:
        # Plain torch computes the convolution, from batch data in host memory. Steps are therefore not captured.
        self.captures_state = False
        return ShortConvolution(sizes, weights, self.device)

    def scan(self, sizes: ScanSizes, weights: ScanWeights) -> ScanOp:
        # Plain torch computes the scan, from batch data in host memory. Steps are therefore not captured.
        self.captures_state = False
        return StateSpace(sizes, weights, self.device)

    def group_norm(self, weight: Tensor, groups: int, eps: float) -> Callable[[Tensor], Tensor]:
        return self._torch.group_norm(weight, groups, eps)

    def rope_tables(self, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        return self._torch.rope_tables(positions, frequencies, factor)

    def rotate_store(
        self,
        qkv: Tensor,
        heads: int,
        rope: tuple[Tensor, Tensor],
        cache: Tensor,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        return rotate_store(qkv, heads, rope, cache, slots, norms)

    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        return gate_mul(gate_up, gate)

    def page_bytes(self, kv_heads: int, head_dim: int, values: bool = True) -> int:
        if values and self._in_bytes(head_dim):
            return kv_cache.page_bytes(kv_heads, head_dim)
        return self._torch.page_bytes(kv_heads, head_dim, values)

    def partials_bytes(self, sequences: int, heads: int, kv_heads: int, head_dim: int) -> int:
        return attention.partials_bytes(sequences, heads, kv_heads, head_dim)

    def new_cache(self, kv_heads: int, pages: int, head_dim: int, values: bool = True) -> Tensor:
        if values and self._in_bytes(head_dim):
            return kv_cache.new_cache(kv_heads, pages, head_dim, self.device)
        return self._torch.new_cache(kv_heads, pages, head_dim, values)

    def attend(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        """Return the attention [rows, heads, head_dim] of queries (see `Ops.attend`).

        Raises:
            RuntimeError: the Triton kernels do not support the batch, and plain torch cannot compute it, because the KV
                cache has 8 bits or the pass is being captured as a graph.
        """
        rows, _, dim = queries.shape
        # The tokens of an image attend to the whole image, which the Triton kernels do not support.
        if batch.attention_ends is not None and not kind.causal:
            if self._in_bytes(dim):
                raise RuntimeError("images of this model need a KV cache of 16 bits; set kv_dtype = 'unquantized'")
            return self._torch.attend(queries, cache, batch, kind)
        if dim <= attention.widest(self.gpu) and not (self.copies_pages and attention.has_long(batch, rows)):
            return attention.attend(queries, cache, batch, kind, self.gpu)
        # A batch with a bucket is being captured as a graph. Plain torch would read the batch in host memory, which a
        # replay does not repeat.
        if batch.bucket:
            raise RuntimeError(
                f'this GPU has no kernels for {rows} rows of heads of {dim} numbers; use kernels = "torch"'
            )
        return self._torch.attend(queries, cache, batch, kind)

    def attend_frames(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None, lengths: tuple[int, ...], scale: float
    ) -> Tensor:
        if self.copies_pages or qkv.shape[2] > frame_attention.WIDEST:
            return self._torch.attend_frames(qkv, rope, lengths, scale)
        return frame_attention.attend_frames(qkv, rope, lengths, scale, self.gpu)

    def _in_bytes(self, head_dim: int) -> bool:
        return self.kv_bits == 8 and head_dim <= attention.widest(self.gpu)


def _joined(biases: Sequence[Tensor | None]) -> Tensor | None:
    present = [bias.float() for bias in biases if bias is not None]
    return torch.cat(present) if present else None
