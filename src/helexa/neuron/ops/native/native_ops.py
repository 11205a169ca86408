"""CPU kernels in C, which multiply quantized weights directly.

Activations between kernels are float32. Matrix products round activations to integers, in groups of 32 numbers.
Every row is computed with the same operations in the same order. Other sequences in the batch, prefill chunk boundaries
and prefix cache hits therefore never change the tokens of a sequence.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helexa.core.errors import ModelFileError
from helexa.neuron import tensors
from helexa.neuron.cache_folder import PACKED_FOLDER, cache_root, model_name
from helexa.neuron.ops.batch import AttentionKind, Batch
from helexa.neuron.ops.convolution import ConvOp, ConvSizes, ConvWeights
from helexa.neuron.ops.expert_routing_and_mixture import Clamp, Expert, ExpertShares, MixtureOp, Routing
from helexa.neuron.ops.gated_delta import DeltaOp, DeltaRule, DeltaSizes, DeltaWeights
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.kernel_header import LANES, MAX_DIM, MIXED, SAMPLED_ARRAYS
from helexa.neuron.ops.linear_and_norm_operators import (
    HeadLinearOp,
    HeadNorms,
    LinearOp,
    NormOp,
    ProductBytes,
    QueryTemperature,
)
from helexa.neuron.ops.native.attention import PagedAttention, attend_frames
from helexa.neuron.ops.native.captured_graph import Graphs, Workspace
from helexa.neuron.ops.native.convolution_and_state_space import NativeShortConvolution, NativeStateSpace, SpanList
from helexa.neuron.ops.native.gated_delta import NativeDelta
from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.ops.native.launcher import GATES, Launcher
from helexa.neuron.ops.native.linear_and_norms import NativeGroupNorm, NativeLayerNorm, NativeLinear, NativeRmsNorm
from helexa.neuron.ops.native.mixture import NativeHeadLinear, NativeMixture
from helexa.neuron.ops.native.packed_weights import HugeMemory, PackedMatrix, pack, packed_bytes, quantize
from helexa.neuron.ops.native.packed_weights_cache import PackedStore, fingerprint, loading_code_version
from helexa.neuron.ops.native.sampling import log_probabilities, sample
from helexa.neuron.ops.rank_group_and_shares import Exchange, RowRange, Shares
from helexa.neuron.ops.sampling import Masks, Sampling
from helexa.neuron.ops.state_cache import ConvCache
from helexa.neuron.ops.state_space import ScanOp, ScanSizes, ScanWeights
from helexa.neuron.tensors import DType, Tensor
from helexa.neuron.weights.quantization_formats import QuantFormat
from helexa.neuron.weights.quantized_matrix import Weight

_log = logging.getLogger("helexa.neuron.ops")
# Settings of a model's configuration that must be multiples of `LANES`.
_WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "moe_latent_size",
    "shared_expert_intermediate_size",
    "linear_value_head_dim",
    "mamba_d_head",
    "mamba_d_state",
    "hidden_size_per_layer_input",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
)


class NativeOps(Ops):
    """Kernels in C with their own thread pool; `Ops` describes the methods.

    The KV cache of a layer is uint8 [pages, kv_heads, bytes]. `kernels/kernels.h` defines the layout of a page.

    Args:
        threads: number of threads that run kernels.
        kv_bits: bits of each number in the KV cache: 16 for bfloat16, or 8 for 8-bit numbers with one scale per token
            and head. 8-bit keys are differences from the first key of their page. Caches without values have 16 bits.
        x_bits: bits to which products with quantized weights round activations: 16, 8, or MIXED for 8 bits, with 16
            bits for outliers.
    """

    name = "native"
    counts_items = True
    skips_pages = True

    def __init__(self, library: KernelLibrary, threads: int, kv_bits: int = 16, x_bits: int = MIXED) -> None:
        super().__init__(
            tensors.device("cpu"),
            tensors.bfloat16,
            kv_bits=kv_bits,
            quantized=True,
            copies_matrices=False,
            fixed_addresses=False,
            captures_state=True,
            copies_pages=False,
        )
        library.start_threads(threads)
        self._library = library
        workspace = Workspace()
        self._graphs = Graphs(library, workspace)
        self._launcher = Launcher(workspace, self._graphs, x_bits)
        self._take, self._launch = self._launcher.take, self._launcher.launch
        self._memory = HugeMemory()
        self.x_bits = x_bits
        self._attention = PagedAttention(self._launcher, kv_bits)
        self._spans = SpanList()
        self._states: list[ConvCache] = []  # recurrent states of the layers with native kernels

    @property
    def activation_dtype(self) -> DType:
        return tensors.float32

    @staticmethod
    def unsupported_shape(config: dict[str, Any]) -> str | None:
        """Return why the kernels do not support a model's shapes; None if they do."""
        heads, hidden = config.get("num_attention_heads") or 1, config.get("hidden_size") or 0
        dim = config.get("head_dim") or hidden // heads
        if rank := config.get("kv_lora_rank"):  # latent attention: the KV cache has one head
            dim = rank + (config.get("qk_rope_head_dim") or 0)
        widths = (*(config.get(name) or 0 for name in _WIDTHS), dim)
        if any(width % LANES for width in widths):
            return f"widths {tuple(width for width in widths if width)} are not all multiples of {LANES}"
        if (state := config.get("mamba_d_state") or 0) > MAX_DIM:
            return f"Mamba-2 states of {state} numbers are larger than {MAX_DIM}"
        for layer_dim in (dim, config.get("global_head_dim") or dim):  # some layers of Gemma 4 have larger heads
            if layer_dim % (2 * LANES):
                return f"heads of {layer_dim} numbers are not a multiple of {2 * LANES}"
            if layer_dim > MAX_DIM:
                return f"heads of {layer_dim} numbers are larger than {MAX_DIM}"
        return None

    @staticmethod
    def requires_torch(config: dict[str, Any]) -> str | None:
        """Return which layer of a supported model needs torch; None for no layer.

        Experts with different formats need torch, too, but only `mixture` finds them.
        """
        dim = config.get("linear_key_head_dim") or LANES
        fits = NativeDelta.fits(DeltaSizes(1, 1, dim, LANES, 1))
        return None if fits else f"linear attention with keys of {dim} numbers"

    def store(self, model: Path, quant: str = "", part: str = "") -> PackedStore:
        # Changed model files, other packing code and another quantization each need other packed weights.
        key, version = f"{fingerprint(model)} {quant}", f"{self._library.layout} {loading_code_version()}"
        if part:
            key += f" {part}"
        return PackedStore(self._library, cache_root(None) / PACKED_FOLDER, key, version, model_name(model))

    def matrix(self, weight: Weight, quant_format: QuantFormat | None = None) -> PackedMatrix:
        quantized = None
        if quant_format is not None and isinstance(weight, Tensor):
            quantized = quantize(self._library, weight, quant_format, self._memory)
        return quantized or pack(self._library, weight, self._memory)

    def linear(self, matrices: Sequence[PackedMatrix], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        self.step_bytes += sum(matrix.data.nbytes for matrix in matrices)
        return NativeLinear(self._launcher, matrices, bias, gate)

    def head_linear(self, matrices: Sequence[PackedMatrix]) -> HeadLinearOp:
        # The operator uses the kernels for experts, which require one format for all matrices.
        if len({matrix.number for matrix in matrices}) > 1:
            raise ModelFileError(
                "the weights of one layer's attention heads have different quantization formats, expected one"
            )
        self.step_bytes += sum(matrix.data.nbytes for matrix in matrices)
        return NativeHeadLinear(self._launcher, matrices)

    def matrix_bytes(self, weight: Weight) -> int:
        return packed_bytes(self._library, weight)

    def product_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        """Return 0 bytes, because operators read the packed weights without a copy."""
        return ProductBytes(0)

    def head_linear_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        """Return 0 bytes, because the operator reads the packed weights without a copy."""
        return ProductBytes(0)

    def mixture(
        self,
        experts: Sequence[Expert],
        routing: Routing,
        clamp: Clamp | None = None,
        shares: ExpertShares | None = None,
        act: str = "silu",
    ) -> MixtureOp:
        # The native kernels multiply all experts in one call, which requires equal formats. Otherwise, the base class
        # computes one expert after another.
        if not NativeMixture.fits(experts):
            tensors.require_torch("a mixture whose experts have different formats")
            return super().mixture(experts, routing, clamp, shares, act)
        weight_bytes = sum(matrix.data.nbytes for expert in experts for matrix in (*expert.gate_up, expert.down))
        self.step_bytes += weight_bytes * routing.top_k // len(experts)
        return NativeMixture(self._launcher, experts, routing, clamp, shares, act)

    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        self._launch("add_gated", out=out, x=x, gate=gate, rows=out.shape[0], width=out.shape[1])
        return out

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        self._launch("add_gated", out=out, x=x, gate=None, rows=out.shape[0], width=out.shape[1])
        return out

    def connect(self, exchange: Exchange) -> None:
        assert exchange.memory is not None
        self.exchange = exchange
        self._launcher.share(exchange.memory, self.ranks)
        self._library.join_ranks(exchange.memory, self.ranks)

    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        return self._launcher.gather(x, shares)

    def sum_ranks(self, x: Tensor) -> Tensor:
        return self._launcher.sum_ranks(x)

    def embedding(
        self, matrix: PackedMatrix, tokens: Tensor, factor: float = 1.0, rows: RowRange | None = None
    ) -> Tensor:
        count, columns = tokens.shape[0], matrix.columns
        out = self._take(count, columns)
        kernel, number = ("embed_plain", {}) if matrix.number is None else ("embed", {"number": matrix.number})
        arguments = {"tokens": tokens, "matrix": matrix.data, "out": out, "count": count, "columns": columns}
        self._launch(
            kernel,
            **arguments,
            **number,
            first=0 if rows is None else rows.start,
            outputs=matrix.outputs,
            factor=factor,
        )
        return out

    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        return NativeRmsNorm(self._launcher, weight, eps)

    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float) -> NormOp:
        return NativeLayerNorm(self._launcher, weight, bias, eps)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        return self._launcher.activate(x, activation)

    def rope_tables(self, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        rows, half = positions.shape[0], frequencies.shape[0]
        cos, sin = self._take(rows, half), self._take(rows, half)
        tables = {"positions": positions, "frequencies": frequencies, "cosines": cos, "sines": sin}
        self._launch("rope_tables", **tables, rows=rows, half=half, factor=factor)
        return cos, sin

    def rotate_store(
        self,
        qkv: Tensor,
        heads: int,
        rope: tuple[Tensor, Tensor],
        cache: Tensor,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        rows, dim, (cosines, sines) = qkv.shape[0], qkv.shape[2], rope
        formats = self._attention.format_of(cache, dim)
        # For an 8-bit cache, the kernel returns Hadamard transformed queries (see `kernels/kernels.h`).
        queries = self._take(rows, heads, dim, dtype=tensors.float32 if formats["narrow"] else tensors.bfloat16)
        self._launch(
            "rotate_store",
            qkv=qkv,
            cosines=cosines,
            sines=sines,
            queries=queries,
            cache=cache,
            slots=slots,
            query_norm=None if norms is None else norms.query,
            key_norm=None if norms is None else norms.key,
            rows=rows,
            heads=heads,
            kv_heads=cache.shape[1],
            width=qkv.shape[1],
            dim=dim,
            half=cosines.shape[1],
            norm_last=norms is not None and norms.last,
            **formats,
            eps=0.0 if norms is None else norms.eps,
            norm_values=norms is not None and norms.values,
        )
        return queries

    def join_latent(
        self, queries: Tensor, absorbed: Tensor, latent: Tensor, norm: Tensor, eps: float, interleaved: bool
    ) -> Tensor:
        (rows, heads, rank), width = absorbed.shape, latent.shape[1]
        out = self._take(rows, heads + 1, width)
        size = {"rows": rows, "heads": heads, "width": queries.shape[2], "rank": rank, "rotated": width - rank}
        inputs = {"queries": queries, "absorbed": absorbed, "latent": latent, "norm": norm}
        self._launch("join_latent", **inputs, out=out, **size, interleaved=interleaved, eps=eps)
        return out

    def scale_queries(self, qkv: Tensor, heads: int, positions: Tensor, temperature: QueryTemperature) -> Tensor:
        rows, all_heads, dim = qkv.shape
        size = {"rows": rows, "stride": all_heads * dim, "width": heads * dim, "length": temperature.length}
        self._launch("scale_queries", x=qkv, positions=positions, slope=temperature.slope, **size)
        return qkv

    def norm_columns(self, x: Tensor, weights: tuple[Tensor, Tensor], eps: float) -> Tensor:
        first, second = weights
        size = {"rows": x.shape[0], "stride": x.shape[1], "first_width": len(first), "second_width": len(second)}
        self._launch("norm_columns", x=x, first=first, second=second, eps=eps, **size)
        return x

    def without_norm(self) -> NormOp:
        return self._add_rows

    def _add_rows(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        if delta is not None:
            self.add(x, delta)
        return x

    def join_queries(self, gated: Tensor, kv: Tensor) -> Tensor:
        (rows, heads, _, dim), both = gated.shape, kv.shape[1]
        qkv = self._take(rows, heads + both, dim)
        size = {"rows": rows, "heads": heads, "kv_heads": both // 2, "dim": dim}
        self._launch("join_queries", gated=gated, kv=kv, qkv=qkv, **size)
        return qkv

    def gate_heads(self, x: Tensor, gated: Tensor) -> Tensor:
        rows, heads, dim = x.shape
        first = 0 if len(gated.shape) == 3 else dim
        self._launch("gate_heads", x=x, gated=gated, rows=rows, heads=heads, dim=dim, first=first)
        return x

    def add_scaled(self, x: Tensor, delta: Tensor, factor: float) -> Tensor:
        self._launch("add_scaled", x=x, delta=delta, rows=x.shape[0], width=x.shape[1], factor=factor)
        return x

    def gate_inputs(self, x: Tensor, inputs: Tensor, first: int, gate: str) -> Tensor:
        rows, width = x.shape
        out = self._take(rows, width)
        size = {"rows": rows, "width": width, "stride": inputs.shape[1], "first": first}
        self._launch("gate_inputs", x=x, inputs=inputs, out=out, **size, gate=GATES[gate])
        return out

    def soft_cap(self, logits: Tensor, cap: float, bias: Tensor | None = None) -> Tensor:
        rows, width = logits.shape
        self._launch("soft_cap", x=logits, bias=bias, rows=rows, width=width, cap=cap)
        return logits

    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        return self._launcher.gate_mul(gate_up, gate)

    def choose_rows(self, x: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
        return self._launcher.choose_rows(x, rows, out)

    def sample(self, logits: Tensor, sampling: Sampling, last: Tensor | None = None) -> Tensor:
        return sample(self._launcher, logits, sampling, last)

    def sample_masked(self, logits: Tensor, masks: Masks, sampling: Sampling, last: Tensor | None = None) -> list[int]:
        return sample(self._launcher, logits, sampling, last, masks).tolist()

    def log_probabilities(
        self, logits: Tensor, tokens: Tensor, alternatives: int, rows: NDArray[np.int32] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return log_probabilities(self._launcher, logits, tokens, alternatives, rows)

    def delta_rule(self, sizes: DeltaSizes, weights: DeltaWeights) -> DeltaOp:
        if NativeDelta.fits(sizes):
            return NativeDelta(self._launcher, sizes, weights, self._spans, self._states.append)
        tensors.require_torch(f"linear attention with keys of {sizes.key_dim} numbers")
        # Plain torch updates the state. A captured graph contains only native kernels, so it would not update the
        # state.
        self.captures_state = False
        return DeltaRule(sizes, weights, self.rms_norm(weights.norm, weights.eps), self.device)

    def short_convolution(self, sizes: ConvSizes, weights: ConvWeights) -> ConvOp:
        return NativeShortConvolution(self._launcher, sizes, weights, self._spans, self._states.append)

    def scan(self, sizes: ScanSizes, weights: ScanWeights) -> ScanOp:
        return NativeStateSpace(self._launcher, sizes, weights, self._spans, self._states.append)

    def group_norm(self, weight: Tensor, groups: int, eps: float) -> Callable[[Tensor], Tensor]:
        return NativeGroupNorm(self._launcher, weight, groups, eps)

    def page_bytes(self, kv_heads: int, head_dim: int, values: bool = True) -> int:
        return self._attention.page_bytes(kv_heads, head_dim, values)

    def sampling_bytes(self, rows: int, width: int) -> int:
        return SAMPLED_ARRAYS * min(rows, tensors.get_num_threads()) * width * 4 + rows * width // 8

    def partials_bytes(self, sequences: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return 0, because `AttentionPlan` allocates partial results once."""
        return 0

    def new_cache(self, kv_heads: int, pages: int, head_dim: int, values: bool = True) -> Tensor:
        return self._attention.new_cache(kv_heads, pages, head_dim, values)

    def attend(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        # `attend` works only in a forward pass that `run` executes, because `run` computes the work list for the batch
        # (see `AttentionPlan`).
        return self._attention.attend(queries, cache, batch, kind, sampled=False)

    def attend_sampled(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        return self._attention.attend(queries, cache, batch, kind, sampled=True)

    def attend_frames(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None, lengths: tuple[int, ...], scale: float
    ) -> Tensor:
        return attend_frames(self._launcher, qkv, rope, lengths, scale)

    def run(self, forward: Callable[[Batch], Tensor], batch: Batch, capture: bool = True) -> Tensor:
        """Return a forward pass's result, by replay of a captured graph if possible.

        If no graph has the batch's number of rows and of sampled rows, the method first captures a graph. If `capture`
        is False, or if a part of the model has no native kernel, the method only calls `forward`.
        """
        self._attention.lay(batch)
        if self._states:
            self._spans.lay(batch)
        if not capture:
            return forward(batch)
        # None until the first run has checked whether the model also computes outside the native kernels
        known = self._graphs.complete
        inputs = [batch.tokens, batch.positions, batch.slots]
        if batch.window_slots is not None:
            inputs.append(batch.window_slots)
        samples = batch.sample_rows.shape[0]
        logits = self._graphs.run(inputs, samples, lambda: forward(batch), lambda: self._save_states(batch))
        if known is None and self._graphs.complete is False:
            _log.info("a part of the model has no native kernel; steps run kernel by kernel without captured graphs")
        return logits

    def _save_states(self, batch: Batch) -> Callable[[], None]:
        """Save the batch's recurrent states, and return a function that restores them."""
        slots = batch.spans.state_slots.long()
        saved = [(cache, cache.gather(slots)) for cache in self._states]

        def restore() -> None:
            for cache, states in saved:
                cache.scatter(slots, states)

        return restore

    def capture(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """Raise NotImplementedError, because `run` captures graphs itself."""
        raise NotImplementedError

    def forget(self) -> None:
        """Do nothing, because `run` limits the memory of captured graphs itself."""
