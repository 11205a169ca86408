"""Kernels for GPUs: Triton kernels for most operations, and plain torch for the other operations."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helexa.neuron.ops import sampling
from helexa.neuron.ops.attention_kind import AttentionKind
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.delta.delta_rule import DeltaOp, DeltaSizes, DeltaWeights
from helexa.neuron.ops.expert_by_expert import expert_by_expert
from helexa.neuron.ops.gpu.step_graphs import CudaCapture, StepGraphs, without_capture
from helexa.neuron.ops.linear import ConcatenatedLinear, DenseLinear, GatedLinear, LinearOp, ProductBytes
from helexa.neuron.ops.mixture import Clamp, Expert, ExpertShares, MixtureOp, Routing
from helexa.neuron.ops.norm import HeadNorms, NormOp
from helexa.neuron.ops.protocol import MatrixStore, Ops
from helexa.neuron.ops.ranks.exchange import Exchange
from helexa.neuron.ops.ranks.shares import RowRange, Shares
from helexa.neuron.ops.reference.reference import ReferenceOps
from helexa.neuron.ops.triton import sampling as draws
from helexa.neuron.ops.triton.attention import attention, kv_cache
from helexa.neuron.ops.triton.attention.frame_attention import attend_frames
from helexa.neuron.ops.triton.attention.rotation import rotate_store
from helexa.neuron.ops.triton.delta.delta_rule import DeltaRule
from helexa.neuron.ops.triton.gate import activate, gate_mul
from helexa.neuron.ops.triton.gpu_properties import GpuProperties
from helexa.neuron.ops.triton.mixture import GpuMixture, stacked
from helexa.neuron.ops.triton.norm import LayerNorm, RmsNorm
from helexa.neuron.ops.triton.products.dequantize import dequantize, dequantize_rows
from helexa.neuron.ops.triton.products.linear import SCRATCH_BYTES, PackedLinear
from helexa.neuron.ops.triton.products.packed import PackedMatrix, pack, packed_bytes
from helexa.neuron.weights.formats import GroupwiseTensor, Weight
from helexa.neuron.weights.quantization.quant_form import QuantForm
from helexa.neuron.weights.quantization.quantize import quantize


class GpuOps(Ops):
    """Kernels for a CUDA device, or for a CPU with Triton's interpreter.

    Args:
        kv_bits: 8 for an 8-bit KV cache. For other values, and if plain torch computes the attention of prompts (see
            `Ops.gathers`), the numbers in the cache have the dtype `dtype`.
        gpu: properties of the GPU for which tile shapes are selected; None to use the properties of `device`.
    """

    name = "triton"

    def __init__(
        self, device: torch.device, dtype: torch.dtype, kv_bits: int = 16, gpu: GpuProperties | None = None
    ) -> None:
        self.gpu = gpu or GpuProperties.from_device(device)
        # Plain torch computes the attention of prompts if Triton would compute it without tensor cores.
        gathers = not (self.gpu.tensor_cores and (dtype.itemsize == 2 or device.type != "cuda"))
        super().__init__(
            device,
            dtype,
            kv_bits=8 if kv_bits == 8 and not gathers else dtype.itemsize * 8,
            quantised=True,
            joins=True,
            tabled=True,
            captures_state=True,
            gathers=gathers,
        )
        self._torch = ReferenceOps(device, dtype)
        self._graphs = StepGraphs(CudaCapture() if device.type == "cuda" else without_capture)

    def capture(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """Capture the forward pass of a bucket (batch size) as a CUDA graph, with the padding batch `blank`."""
        self._graphs.capture(forward, blank)

    def forget(self) -> None:
        """Release all captured graphs and their memory."""
        self._graphs.forget()

    def run(self, forward: Callable[[Batch], Tensor], batch: Batch, capture: bool = True) -> Tensor:
        """Return the result of a forward pass, usually logits [S, V], which is valid until the next call.

        If the batch is padded to a bucket (batch size) with a captured graph, the method replays the graph. Otherwise
        the method calls `forward`.
        """
        return self._graphs.run(forward, batch)

    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        """Return an operator that computes the RMS norm in a Triton kernel, with one program per row."""
        return RmsNorm(weight, eps, self.dtype)

    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float) -> NormOp:
        """Return an operator that computes the layer norm in a Triton kernel, with one program per row."""
        return LayerNorm(weight, bias, eps, self.dtype)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Return the activation of each number of x [T, I]. `activation` is `silu`, `gelu_tanh` or `gelu`."""
        return activate(x, activation)

    def store(self, model: Path, quant: str = "", part: str = "") -> MatrixStore | None:
        """Return None, because these kernels do not store prepared weights on disk."""
        return None

    def matrix(self, weight: Weight, form: QuantForm | None = None) -> Tensor | PackedMatrix:
        """Return a weight [N, K] in the layout of these kernels (see `Ops.matrix`).

        For a quantized weight whose shape and group size the Triton kernels support, the result is a `PackedMatrix`.
        Otherwise the result is a plain tensor of the activation dtype. If `form` is given, a plain weight is quantized
        first.
        """
        if form is not None and isinstance(weight, Tensor):
            weight = quantize(weight.to(self.device), form) or weight
        packed = pack(weight.to(self.device)) if isinstance(weight, GroupwiseTensor) else None
        return packed or self._torch.dense(weight)

    def linear(self, matrices: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Return an operator that computes `x @ weight.T + bias` for inputs x [T, K] (see `Ops.linear`).

        Quantized matrices stay quantized in memory. Products with plain matrices use cuBLAS.
        """
        packed = [isinstance(matrix, PackedMatrix) for matrix in matrices]
        shift = None if bias is None else bias.to(self.device, self.dtype)
        if all(packed):
            product = PackedLinear(matrices, bias, self._scratch, self.gpu)
            self.step_bytes += product.nbytes
        elif any(packed):
            product = ConcatenatedLinear([self.linear([matrix], None) for matrix in matrices], shift)
        else:
            weight = torch.cat([*matrices]) if len(matrices) > 1 else matrices[0]
            product = DenseLinear(weight, shift)
            self.step_bytes += weight.nbytes
        return GatedLinear(lambda x: self.gate_mul(x, gate), product) if gate else product

    def matrix_bytes(self, weight: Weight) -> int:
        """Return the number of bytes of the matrix that `matrix()` builds from a weight [N, K]."""
        packed = packed_bytes(weight) if isinstance(weight, GroupwiseTensor) else None
        return self._torch.dense_bytes(weight) if packed is None else packed

    def product_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        """Return the number of bytes that `linear` or `mixture` allocates in addition to the given weights.

        Several weights are copied into one matrix. A single weight is used without a copy.
        """
        return ProductBytes(sum(self.matrix_bytes(weight) for weight in weights) if len(weights) > 1 else 0)

    def connect(self, exchange: Exchange) -> None:
        """Set how this rank exchanges results with the other ranks that compute the model."""
        self.exchange = exchange
        self._torch.ranks = self.ranks
        self._torch.connect(exchange)

    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        """Return the columns of all ranks, [T, `shares.total`], from this rank's columns x (all-gather)."""
        return self._torch.gather(x, shares)

    def sum_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of x [T, H] over all ranks (all-reduce), added in the order of the ranks."""
        return self._torch.sum_ranks(x)

    def mixture(
        self,
        experts: Sequence[Expert],
        routing: Routing,
        clamp: Clamp | None = None,
        shares: ExpertShares | None = None,
    ) -> MixtureOp:
        """Return an operator that computes a mixture of experts with a few kernels for all experts.

        Matrices of different formats are dequantized first, so that the kernels can use them as one matrix. The
        operator runs one expert after another if the experts are divided among ranks, or if the kernels do not support
        the shape of the matrices.
        """
        if shares is not None:
            return expert_by_expert(self, experts, routing, clamp, shares)
        gate_ups, downs = (
            [matrix for expert in experts for matrix in expert.gate_up],
            [expert.down for expert in experts],
        )
        gate_up, down = self._stacked(gate_ups), self._stacked(downs)
        if gate_up is None or down is None:
            return expert_by_expert(self, experts, routing, clamp)
        self.step_bytes += (gate_up.nbytes + down.nbytes) * routing.chosen // len(experts)
        biases = _joined([e.gate_up_bias for e in experts]), _joined([e.down_bias for e in experts])
        return GpuMixture(len(experts), gate_up, down, biases, routing, clamp, self.dtype, self.gpu)

    def dense(self, weight: Weight | PackedMatrix) -> Tensor:
        """Return a plain, quantized or packed weight as a plain tensor of the activation dtype."""
        if not isinstance(weight, PackedMatrix):
            return self._torch.dense(weight)
        out = torch.empty(weight.shape, dtype=self.dtype, device=self.device)
        dequantize(weight, 0, out)
        return out

    def embedding(self, matrix: Any, tokens: Tensor, factor: float = 1.0, rows: RowRange | None = None) -> Tensor:
        """Return the embeddings of T tokens: rows of a matrix [V, H], times `factor`, as float32 [T, H].

        Token ids outside the range `rows` get zeros.
        """
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

    def choose(self, logits: Tensor, settings: sampling.Settings) -> Tensor:
        """Return a sampled token for each row of logits [S, V], without waiting for the device (see `Ops.choose`)."""
        return draws.choose(logits, settings)

    def choose_masked(self, logits: Tensor, masks: sampling.Masks, settings: sampling.Settings) -> list[int]:
        """Return a sampled token for each row of `logits` that has a mask, among the tokens that the mask allows."""
        return draws.choose(draws.masked(logits, masks), settings).tolist()

    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """Return `out + x * sigmoid(gate)` for out and x [T, H] and gate [T, 1]; changes `out` in place."""
        return self._torch.add_gated(out, x, gate)

    def choose_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return the S rows of x [T, H] with the indexes `rows` [S], as [S, H]."""
        return x[rows]

    def state_bytes(self, sizes: DeltaSizes) -> int:
        """Return the number of bytes of one sequence's recurrent state in a Gated DeltaNet layer of these sizes."""
        return DeltaRule.state_bytes(sizes, self.dtype)

    def delta_rule(self, sizes: DeltaSizes, weights: DeltaWeights) -> DeltaOp:
        """Return an operator that computes a Gated DeltaNet layer without its input and output projections.

        One kernel computes decode rows one after another. Four kernels compute long prompts in chunks.
        """
        return DeltaRule(sizes, weights, self.dtype, self.gpu)

    def rope_tables(self, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the RoPE tables: cos and sin of positions [T] times frequencies [R / 2], both float32 [T, R / 2]."""
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
        """Apply norms and RoPE to queries and keys, and write keys and values to the KV cache (see `Ops.rotate_store`).

        Rows with slot -1 are padding rows, which are not written to the cache.

        Returns:
            The rotated queries, [T, heads, D].
        """
        return rotate_store(qkv, heads, rope, cache, slots, norms)

    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        """Return `gate(first half) * second half` of `gate_up` [T, 2 * I]. `gate` is `silu` or `gelu_tanh`."""
        return gate_mul(gate_up, gate)

    def page_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Return the number of bytes of one KV page in one layer."""
        if self._in_bytes(head_dim):
            return kv_cache.page_bytes(kv_heads, head_dim)
        return self._torch.page_bytes(kv_heads, head_dim)

    def partials_bytes(self, sequences: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return the maximum number of bytes that attention in a decode step allocates for partial results."""
        return attention.partials_bytes(sequences, heads, kv_heads, head_dim)

    def new_cache(self, kv_heads: int, pages: int, head_dim: int) -> Tensor:
        """Return a zeroed KV cache with `pages` pages for one layer.

        The module `triton.attention.kv_cache` describes the layout of an 8-bit cache. Other caches have the layout of
        `ReferenceOps`.
        """
        if self._in_bytes(head_dim):
            return kv_cache.new_cache(kv_heads, pages, head_dim, self.device)
        return self._torch.new_cache(kv_heads, pages, head_dim)

    def attend(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        """Return the causal attention output [T, heads, D] of queries [T, heads, D] over their sequences' KV pages.

        Plain torch computes the batches that the Triton kernels do not support on this GPU, and images whose tokens
        attend to the whole image.

        Raises:
            RuntimeError: the Triton kernels do not support the batch, and plain torch cannot compute it, because a
                graph is captured.
        """
        rows, _, dim = queries.shape
        if batch.attention_ends is not None:
            if self._in_bytes(dim):
                raise RuntimeError("images of this model need a KV cache of 16 bits (kv_dtype)")
            return self._torch.attend(queries, cache, batch, kind)
        if dim <= attention.WIDEST and not (self.gathers and attention.has_long(batch, rows)):
            return attention.attend(queries, cache, batch, kind, self.gpu)
        if batch.bucket:
            raise RuntimeError(f"this GPU has no kernels for {rows} rows of heads of {dim}")
        return self._torch.attend(queries, cache, batch, kind)

    def attend_frames(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None, lengths: tuple[int, ...], scale: float
    ) -> Tensor:
        """Return the attention output [T, heads, D], in which each row attends to all rows of its frame.

        Plain torch computes heads that the Triton kernels do not support on this GPU.

        Args:
            qkv: [T, 3 * heads, D], the query heads, key heads and value heads of each row; may be changed in place.
            rope: cos and sin tables [T, R / 2] to rotate queries and keys by; None for no rotation.
            lengths: number of rows of each frame.
            scale: factor on the products of queries and keys.
        """
        if self.gathers or qkv.shape[2] > attention.WIDEST:
            return self._torch.attend_frames(qkv, rope, lengths, scale)
        return attend_frames(qkv, rope, lengths, scale, self.gpu)

    def _in_bytes(self, head_dim: int) -> bool:
        return self.kv_bits == 8 and head_dim <= attention.WIDEST


def _joined(biases: Sequence[Tensor | None]) -> Tensor | None:
    present = [bias.float() for bias in biases if bias is not None]
    return torch.cat(present) if present else None
