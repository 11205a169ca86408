"""CPU kernels in C, which are compiled on first use and multiply quantized weights directly.

Activations between kernels are float32. Matrix products round activations to integers, in groups of 32 numbers.
Every row is computed with the same operations in the same order. Other sequences in the batch, prefill chunk boundaries
and prefix cache hits therefore never change the tokens of a sequence.
"""

import logging
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helexa.neuron.cache_folder import cache_root
from helexa.neuron.ops import sampling
from helexa.neuron.ops.attention_kind import AttentionKind
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.constants import LANES, MAX_DIM, MAX_QUERIES, MIXED, PAGE_SIZE
from helexa.neuron.ops.delta.delta_cache import DeltaCache
from helexa.neuron.ops.delta.delta_rule import DeltaOp, DeltaRule, DeltaSizes, DeltaWeights
from helexa.neuron.ops.expert_by_expert import expert_by_expert
from helexa.neuron.ops.linear import LinearOp, ProductBytes
from helexa.neuron.ops.mixture import Clamp, Expert, ExpertShares, MixtureOp, Routing
from helexa.neuron.ops.native.attention_plan import AttentionPlan
from helexa.neuron.ops.native.captured_graph import Graphs
from helexa.neuron.ops.native.delta import NativeDelta, SpanList
from helexa.neuron.ops.native.frame_attention import attend_frames
from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.ops.native.launcher import ACTIVATIONS, NO_WINDOW, Launcher
from helexa.neuron.ops.native.linear import NativeLinear
from helexa.neuron.ops.native.loading_code import loading_code_version
from helexa.neuron.ops.native.mixture import NativeMixture
from helexa.neuron.ops.native.norms import NativeLayerNorm, NativeRmsNorm
from helexa.neuron.ops.native.packed import HugeMemory, PackedMatrix, pack, packed_bytes, quantize
from helexa.neuron.ops.native.packed_store import PackedStore, fingerprint
from helexa.neuron.ops.native.workspace import Workspace
from helexa.neuron.ops.norm import HeadNorms, NormOp
from helexa.neuron.ops.protocol import Ops
from helexa.neuron.ops.ranks.exchange import Exchange
from helexa.neuron.ops.ranks.shares import RowRange, Shares
from helexa.neuron.weights.formats import Weight
from helexa.neuron.weights.quantization.quant_form import QuantForm

_log = logging.getLogger("helexa.neuron.ops")
_WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "linear_value_head_dim",
)


class NativeOps(Ops):
    """Kernels in C with their own thread pool.

    The KV cache of a layer is uint8 [pages, kv_heads, bytes]. `kernels/kernels.h` defines the layout of a page.

    Args:
        library: the compiled kernels.
        threads: number of threads that run kernels.
        kv_bits: bits of each number in the KV cache: 16 for bfloat16, or 8 for 8-bit numbers with one scale per token
            and head.
        x_bits: bits to which products with quantized weights round activations: 16, 8, or MIXED for 8 bits, with 16
            bits for outliers.
    """

    name = "native"
    counts_items = True

    def __init__(self, library: KernelLibrary, threads: int, kv_bits: int = 16, x_bits: int = MIXED) -> None:
        super().__init__(
            torch.device("cpu"),
            torch.bfloat16,
            kv_bits=kv_bits,
            quantised=True,
            joins=False,
            tabled=False,
            captures_state=True,
            gathers=False,
        )
        library.start_threads(threads)
        self._library = library
        workspace = Workspace()
        self._graphs = Graphs(library, workspace)
        self._launcher = Launcher(workspace, self._graphs, x_bits)
        self._take, self._launch = self._launcher.take, self._launcher.launch
        self._memory = HugeMemory()
        self.x_bits = x_bits
        self._batch: Batch | None = None
        self._plans: dict[int, AttentionPlan] = {}  # key: query heads per KV head
        self._spans = SpanList()
        self._states: list[DeltaCache] = []  # of the layers with native kernels

    @property
    def activation_dtype(self) -> torch.dtype:
        """Dtype of the tensors that operators pass to each other: float32. Products round their inputs themselves."""
        return torch.float32

    @staticmethod
    def unsupported_shape(config: dict[str, Any]) -> str | None:
        """Return the reason why the kernels do not support a model of this configuration; None if they support it.

        Args:
            config: the model's configuration with the keys of Hugging Face's `config.json`.
        """
        heads, hidden = config.get("num_attention_heads") or 1, config.get("hidden_size") or 0
        dim, group = config.get("head_dim") or hidden // heads, heads // (config.get("num_key_value_heads") or heads)
        widths = (*(config.get(name) or 0 for name in _WIDTHS), dim)
        if any(width % LANES for width in widths):
            return f"widths {tuple(width for width in widths if width)} are not all multiples of {LANES}"
        if dim % (2 * LANES):
            return f"heads of {dim} are no multiple of {2 * LANES}"
        if dim > MAX_DIM or group > MAX_QUERIES:
            return f"heads of {dim} in groups of {group} are too large"
        return None

    def store(self, model: Path, quant: str = "", part: str = "") -> PackedStore:
        """Return the disk cache of the packed weights of the model at the path `model`.

        There is a separate cache file for each version of the model's files, each version of the code that packs
        weights, each quantization and each part of the model.
        """
        key = f"{fingerprint(model)} {self._library.layout} {loading_code_version()} {quant}"
        if part:
            key += f" {part}"
        return PackedStore(self._library, cache_root(None) / "packed", key, torch.get_num_threads())

    def matrix(self, weight: Weight, form: QuantForm | None = None) -> PackedMatrix:
        """Return a weight [N, K] in the tile layout of the native kernels, quantized to `form` if possible."""
        quantised = None
        if form is not None and isinstance(weight, Tensor):
            quantised = quantize(self._library, weight, form, self._memory)
        return quantised or pack(self._library, weight, self._memory)

    def linear(self, matrices: Sequence[PackedMatrix], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Return an operator that computes `x @ weight.T + bias` for inputs x [T, K] (see `Ops.linear`).

        The operator rounds the input once for all matrices, and then runs one kernel per matrix.
        """
        self.step_bytes += sum(matrix.data.nbytes for matrix in matrices)
        return NativeLinear(self._launcher, matrices, bias, gate)

    def matrix_bytes(self, weight: Weight) -> int:
        """Return the number of bytes of the matrix that `matrix()` builds from a weight [N, K]."""
        return packed_bytes(self._library, weight)

    def product_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        """Return 0 bytes, because `linear` and `mixture` read the given packed weights without a copy."""
        return ProductBytes(0)

    def mixture(
        self,
        experts: Sequence[Expert],
        routing: Routing,
        clamp: Clamp | None = None,
        shares: ExpertShares | None = None,
    ) -> MixtureOp:
        """Return an operator that computes a mixture of experts with a few kernels for all experts.

        If `NativeMixture.fits(experts)` is False, the operator runs one expert after another instead.
        """
        if not NativeMixture.fits(experts):
            return expert_by_expert(self, experts, routing, clamp, shares)
        weight_bytes = sum(matrix.data.nbytes for expert in experts for matrix in (*expert.gate_up, expert.down))
        self.step_bytes += weight_bytes * routing.chosen // len(experts)
        return NativeMixture(self._launcher, experts, routing, clamp, shares)

    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """Return `out + x * sigmoid(gate)` for out and x [T, H] and gate [T, 1]; changes `out` in place."""
        self._launch("add_gated", out=out, x=x, gate=gate, rows=out.shape[0], width=out.shape[1])
        return out

    def connect(self, exchange: Exchange) -> None:
        """Set the shared memory in which this rank exchanges results with the other ranks."""
        assert exchange.memory is not None
        self.exchange = exchange
        self._launcher.share(exchange.memory, self.ranks)
        self._library.join_ranks(exchange.memory, self.ranks)

    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        """Return the columns of all ranks, [T, `shares.total`], from this rank's columns x (all-gather)."""
        return self._launcher.gather(x, shares)

    def sum_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of x [T, H] over all ranks (all-reduce), added in the order of the ranks."""
        return self._launcher.sum_ranks(x)

    def embedding(
        self, matrix: PackedMatrix, tokens: Tensor, factor: float = 1.0, rows: RowRange | None = None
    ) -> Tensor:
        """Return the embeddings of T tokens: dequantized rows of `matrix`, times `factor`, as float32 [T, H].

        Token ids outside the range `rows` get zeros.
        """
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
        """Return an RMS norm operator that uses a native kernel."""
        return NativeRmsNorm(self._launcher, weight, eps)

    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float) -> NormOp:
        """Return a layer norm operator that uses a native kernel."""
        return NativeLayerNorm(self._launcher, weight, bias, eps)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Return the activation of each number of x [T, I], which is changed in place."""
        rows, width = x.shape
        self._launch("activate", x=x, rows=rows, width=width, activation=ACTIVATIONS[activation])
        return x

    def rope_tables(self, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the RoPE tables: cos and sin of positions [T] times frequencies [R / 2], both float32 [T, R / 2]."""
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
        """Apply norms and RoPE to queries and keys, and write keys and values to the KV cache (see `Ops.rotate_store`).

        Returns:
            The rotated queries, bfloat16 [T, heads, D].
        """
        rows, dim, (cosines, sines) = qkv.shape[0], qkv.shape[2], rope
        queries = self._take(rows, heads, dim, dtype=torch.bfloat16)
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
            dim=dim,
            half=cosines.shape[1],
            narrow=self.kv_bits == 8,
            eps=0.0 if norms is None else norms.eps,
        )
        return queries

    def join_queries(self, gated: Tensor, kv: Tensor) -> Tensor:
        """Return the argument `qkv` of `rotate_store`, of attention with output gates (see `Ops.join_queries`)."""
        (rows, heads, _, dim), both = gated.shape, kv.shape[1]
        qkv = self._take(rows, heads + both, dim)
        size = {"rows": rows, "heads": heads, "kv_heads": both // 2, "dim": dim}
        self._launch("join_queries", gated=gated, kv=kv, qkv=qkv, **size)
        return qkv

    def gate_heads(self, x: Tensor, gated: Tensor) -> Tensor:
        """Return `x * sigmoid(gate)` for x [T, heads, D], which is changed in place (see `Ops.gate_heads`)."""
        rows, heads, dim = x.shape
        self._launch("gate_heads", x=x, gated=gated, rows=rows, heads=heads, dim=dim)
        return x

    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        """Return `gate(first half) * second half` of `gate_up` [T, 2 * I]. `gate` is `silu` or `gelu_tanh`."""
        return self._launcher.gate_mul(gate_up, gate)

    def choose_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return the S rows of x [T, H] with the indexes `rows` [S], as [S, H]."""
        return self._launcher.choose_rows(x, rows)

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the token with the largest logit of each row of `logits`, as int64 [S] (see `sampling.argmax`)."""
        # Not from the workspace: if steps overlap, the graph of the next step runs before these tokens are read.
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self._launch("argmax", x=logits, out=out, rows=logits.shape[0], width=logits.shape[1])
        return out

    def choose(self, logits: Tensor, settings: sampling.Settings) -> Tensor:
        """Return a sampled token for each row of logits [S, V] (see `sampling.choose`).

        A native kernel selects the tokens of greedy rows. Plain torch samples the tokens of the other rows.
        """
        return sampling.choose(logits.float(), settings, self.argmax)

    def choose_masked(self, logits: Tensor, masks: sampling.Masks, settings: sampling.Settings) -> list[int]:
        """Return a sampled token for each row of `logits` that has a mask, among the tokens that the mask allows."""
        return sampling.choose_masked(logits.float(), masks, settings)

    def state_bytes(self, sizes: DeltaSizes) -> int:
        """Return the number of bytes of one sequence's recurrent state in a Gated DeltaNet layer of these sizes."""
        return sizes.state_bytes

    def delta_rule(self, sizes: DeltaSizes, weights: DeltaWeights) -> DeltaOp:
        """Return an operator that computes a Gated DeltaNet layer without its input and output projections.

        If `NativeDelta.fits(sizes)` is False, the operator uses plain torch, except for the native RMS norm.
        """
        if NativeDelta.fits(sizes):
            return NativeDelta(self._launcher, sizes, weights, self._spans, self._states.append)
        self.captures_state = False
        return DeltaRule(sizes, weights, self.rms_norm(weights.norm, weights.eps), self.device)

    def page_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Return the number of bytes of one KV page in one layer."""
        return kv_heads * (2 * head_dim * self.kv_bits // 8 + (8 if self.kv_bits == 8 else 0)) * PAGE_SIZE

    def partials_bytes(self, sequences: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return 0, because `AttentionPlan` allocates the memory of partial results once, not in each step."""
        return 0

    def new_cache(self, kv_heads: int, pages: int, head_dim: int) -> Tensor:
        """Return a zeroed KV cache with `pages` pages for one layer.

        The operating system allocates physical memory only when a page is first written.
        """
        size = self.page_bytes(kv_heads, head_dim)
        memory = mmap.mmap(-1, pages * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8).view(pages, kv_heads, size // kv_heads)

    def attend(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        """Return the causal attention output [T, heads, D] of queries [T, heads, D] over their sequences' KV pages.

        Call this method only within a forward pass that `run` executes, because `run` computes the work list of
        attention for the batch (see `AttentionPlan`).
        """
        assert batch is self._batch, "attention outside `run`"
        (rows, heads, dim), kv_heads = queries.shape, cache.shape[1]
        plan = self._plans.get(heads // kv_heads)
        if plan is None:
            plan = self._plans[heads // kv_heads] = AttentionPlan(batch.capacity, heads // kv_heads)
            plan.lay(batch)
        out = self._take(rows, heads, dim)
        both = {"partials": plan.partials(heads, dim), "out": out, "sinks": kind.sinks, "heads": heads, "dim": dim}
        self._launch(
            "attend",
            queries=queries,
            cache=cache,
            tile_count=plan.tile_count,
            tiles=plan.tiles,
            page_numbers=plan.pages,
            kv_heads=kv_heads,
            narrow=self.kv_bits == 8,
            window=kind.window or NO_WINDOW,
            scale=kind.scale,
            **both,
        )
        self._launch("combine", split_count=plan.split_count, splits=plan.splits, **both)
        return out

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
        return attend_frames(self._launcher, qkv, rope, lengths, scale)

    def run(self, forward: Callable[[Batch], Tensor], batch: Batch, capture: bool = True) -> Tensor:
        """Return the result of a forward pass, usually logits [S, V], by replay of a captured graph if possible.

        If no graph has this number of rows and of sampled rows, the method first captures one. If `capture` is False,
        or the model also computes outside the native kernels, the method calls `forward` instead.
        """
        self._batch = batch
        for plan in self._plans.values():
            plan.lay(batch)
        if self._states:
            self._spans.lay(batch)
        if not capture:
            return forward(batch)
        known = self._graphs.complete
        inputs = (batch.tokens, batch.positions, batch.slots)
        samples = batch.sample_rows.shape[0]
        logits = self._graphs.run(inputs, samples, lambda: forward(batch), lambda: self._save_states(batch))
        if known is None and self._graphs.complete is False:
            _log.info("the model computes outside the native kernels: steps run kernel by kernel")
        return logits

    def _save_states(self, batch: Batch) -> Callable[[], None]:
        """Save the recurrent states of the sequences in `batch`, and return a function that restores them."""
        slots = batch.spans.state_slots.long()
        saved = [(cache, cache.gather(slots)) for cache in self._states]

        def restore() -> None:
            for cache, states in saved:
                cache.scatter(slots, states)

        return restore

    def capture(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """Raise NotImplementedError, because `run` captures graphs itself (see `Ops.tabled`)."""
        raise NotImplementedError

    def forget(self) -> None:
        """Do nothing, because `run` limits the memory of captured graphs itself."""
