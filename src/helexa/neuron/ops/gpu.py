"""The kernels of GPUs: Triton where it pays, torch's own for the rest; their twins are in `reference`."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from helexa.neuron.ops import sampling
from helexa.neuron.ops.attention_kind import AttentionKind
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.delta_rule import DeltaOp, DeltaSizes, DeltaWeights
from helexa.neuron.ops.linear import GatedLinear, LinearOp, SideBySide
from helexa.neuron.ops.mixture import Clamp, Expert, MixtureOp, Routing
from helexa.neuron.ops.norm import HeadNorms, NormOp
from helexa.neuron.ops.reference import ReferenceOps
from helexa.neuron.ops.step_graphs import CudaCapture, StepGraphs, again
from helexa.neuron.ops.triton import attention, kv_cache
from helexa.neuron.ops.triton import sampling as draws
from helexa.neuron.ops.triton.card import Card
from helexa.neuron.ops.triton.delta_rule import DeltaRule
from helexa.neuron.ops.triton.dequantize import dequantize, dequantize_rows
from helexa.neuron.ops.triton.gate import gate_mul
from helexa.neuron.ops.triton.linear import SCRATCH_BYTES, PackedLinear
from helexa.neuron.ops.triton.mixture import GpuMixture, stacked
from helexa.neuron.ops.triton.norm import RmsNorm
from helexa.neuron.ops.triton.packed import PackedMatrix, pack
from helexa.neuron.ops.triton.rotation import rotate_store
from helexa.neuron.weights.formats import GroupwiseTensor, Weight
from helexa.neuron.weights.quant_form import QuantForm
from helexa.neuron.weights.quantize import quantize


class GpuOps(ReferenceOps):
    """Kernels for a CUDA device, or for a CPU in Triton's interpreter.

    Args:
        kv_bits: of each number in the KV cache, 16 or 8; where attention has no kernels, as many as the dtype's.
        card: to build kernels for; None for the device's own.
    """

    name = "triton"
    quantised = True
    tabled = True
    records_state = True

    def __init__(self, device: torch.device, dtype: torch.dtype, kv_bits: int = 16, card: Card | None = None) -> None:
        super().__init__(device, dtype)
        self.card = card or Card.of(device)
        # Products of prompts are torch's where Triton would add up number by number.
        self.gathers = not (self.card.tensor_cores and (dtype.itemsize == 2 or device.type != "cuda"))
        if kv_bits == 8 and not self.gathers:
            self.kv_bits = 8
        self._graphs = StepGraphs(CudaCapture() if device.type == "cuda" else again)

    def record(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """See `ReferenceOps`."""
        self._graphs.record(forward, blank)

    def forget(self) -> None:
        """See `ReferenceOps`."""
        self._graphs.forget()

    def run(self, forward: Callable[[Batch], Tensor], batch: Batch, group: int, recorded: bool = True) -> Tensor:
        """Run what is recorded for the batch's bucket, if there is such; the logits are good until the next run."""
        return self._graphs.run(forward, batch)

    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        """One program for a row."""
        return RmsNorm(weight, eps, self.dtype)

    def matrix(self, weight: Weight, form: QuantForm | None = None) -> Tensor | PackedMatrix:
        """In codes if it has them or gets them here, on the device; else in the activation dtype."""
        if form is not None and isinstance(weight, Tensor):
            weight = quantize(weight.to(self.device), form) or weight
        packed = pack(weight.to(self.device)) if isinstance(weight, GroupwiseTensor) else None
        return packed or super().dense(weight)

    def linear(self, parts: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Matrices in codes stay as they are; plain ones are cuBLAS's."""
        packed = [isinstance(part, PackedMatrix) for part in parts]
        if not any(packed):
            return super().linear(parts, bias, gate)
        if all(packed):
            product = PackedLinear(parts, bias, self._scratch, self.card)
            self.step_bytes += product.nbytes
        else:
            shift = None if bias is None else bias.to(self.device, self.dtype)
            product = SideBySide([self.linear([part], None) for part in parts], shift)
        return GatedLinear(lambda x: self.gate_mul(x, gate), product) if gate else product

    def mixture(self, experts: Sequence[Expert], routing: Routing, clamp: Clamp | None = None) -> MixtureOp:
        """All experts in a few kernels; those of several forms are plain."""
        gate_ups, downs = [part for expert in experts for part in expert.gate_up], [expert.down for expert in experts]
        gate_up, down = self._stacked(gate_ups), self._stacked(downs)
        if gate_up is None or down is None:
            return super().mixture(experts, routing, clamp)
        self.step_bytes += (gate_up.nbytes + down.nbytes) * routing.chosen // len(experts)
        biases = _joined([e.gate_up_bias for e in experts]), _joined([e.down_bias for e in experts])
        return GpuMixture(len(experts), gate_up, down, biases, routing, clamp, self.dtype, self.card)

    def dense(self, weight: Weight | PackedMatrix) -> Tensor:
        """See `ReferenceOps`."""
        if not isinstance(weight, PackedMatrix):
            return super().dense(weight)
        out = torch.empty(weight.shape, dtype=self.dtype, device=self.device)
        dequantize(weight, 0, out)
        return out

    def embedding(self, matrix: Any, tokens: Tensor, factor: float = 1.0) -> Tensor:
        """See `ReferenceOps`."""
        if not isinstance(matrix, PackedMatrix):
            return super().embedding(matrix, tokens, factor)
        out = torch.empty((tokens.shape[0], matrix.shape[1]), dtype=torch.float32, device=self.device)
        dequantize_rows(matrix, tokens, factor, out)
        return out

    def _stacked(self, parts: Sequence[Any]) -> PackedMatrix | Tensor | None:
        found = stacked(parts)
        return stacked([self.dense(part) for part in parts]) if found is None else found

    @cached_property
    def _scratch(self) -> Tensor:
        return torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self.device)

    def choose(self, logits: Tensor, settings: sampling.Settings) -> Tensor:
        """See `ReferenceOps`."""
        return draws.choose(logits, settings)

    def choose_of(self, logits: Tensor, masks: sampling.Masks, settings: sampling.Settings) -> list[int]:
        """See `ReferenceOps`."""
        return draws.choose(draws.masked(logits, masks), settings).tolist()

    def state_bytes(self, sizes: DeltaSizes) -> int:
        """See `ReferenceOps`."""
        return DeltaRule.state_bytes(sizes, self.dtype)

    def delta_rule(self, sizes: DeltaSizes, weights: DeltaWeights) -> DeltaOp:
        """One kernel for all that decode, four more for prompts."""
        return DeltaRule(sizes, weights, self.dtype, self.card)

    def rotate_store(
        self,
        qkv: Tensor,
        heads: int,
        rope: tuple[Tensor, Tensor],
        cache: Tensor,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """See `ReferenceOps`; of rows with the slot -1 nothing is stored."""
        return rotate_store(qkv, heads, rope, cache, slots, norms)

    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        """See `ReferenceOps`."""
        return gate_mul(gate_up, gate)

    def page_bytes(self, kv_heads: int, head_dim: int) -> int:
        """See `ReferenceOps`."""
        if self._in_bytes(head_dim):
            return kv_cache.page_bytes(kv_heads, head_dim)
        return super().page_bytes(kv_heads, head_dim)

    def parts_bytes(self, sequences: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """See `ReferenceOps`."""
        return attention.parts_bytes(sequences, heads, kv_heads, head_dim)

    def new_cache(self, kv_heads: int, pages: int, head_dim: int) -> Tensor:
        """See `ReferenceOps`; in 8 bits as `triton.kv_cache` says."""
        if self._in_bytes(head_dim):
            return kv_cache.new_cache(kv_heads, pages, head_dim, self.device)
        return super().new_cache(kv_heads, pages, head_dim)

    def attend(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        """See `ReferenceOps`.

        Raises:
            RuntimeError: a step is recorded, and the kernels do not take it.
        """
        rows, _, dim = queries.shape
        if dim <= attention.WIDEST and not (self.gathers and attention.has_long(batch.tables, rows)):
            return attention.attend(queries, cache, batch.tables, kind, self.card)
        if batch.bucket:
            raise RuntimeError(f"this GPU has no kernels for {rows} rows of heads of {dim}")
        return super().attend(queries, cache, batch, kind)

    def _in_bytes(self, head_dim: int) -> bool:
        return self.kv_bits == 8 and head_dim <= attention.WIDEST


def _joined(biases: Sequence[Tensor | None]) -> Tensor | None:
    found = [bias.float() for bias in biases if bias is not None]
    return torch.cat(found) if found else None
