"""The gated delta rule in Triton: short spans, one program per value head.

A span is the rows (tokens) of one sequence in a batch. Long spans are computed in chunks (see `delta_chunks`).

Each state slot has a ring buffer with the last K inputs of the convolution over K tokens. The input of position p is in
row p mod K. For a span of one row, the new input overwrites an input that the convolution no longer needs. Some
programs can therefore still read the buffer when another program writes the new input.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.gated_delta import DeltaSizes, DeltaWeights
from helexa.neuron.ops.state_cache import MatrixCache
from helexa.neuron.ops.triton.delta_chunks import TABLES, advance_chunks, convolved_row, gates
from helexa.neuron.ops.triton.launch_and_graphs import GpuProperties, launch

# Spans with more rows of accepted tokens are computed in chunks. Decode spans, also with drafts, have fewer rows.
FEW_ROWS = 32

_ALL_ROWS = 1 << 30  # more rows than any span has, so that no span is computed in chunks
_COLUMNS = 1024  # columns of the ring buffer that a program stores


class DeltaRule:
    """Operator of a Gated DeltaNet layer in Triton kernels; implements `DeltaOp`."""

    def __init__(self, sizes: DeltaSizes, weights: DeltaWeights, dtype: torch.dtype, gpu: GpuProperties) -> None:
        self._sizes = sizes
        self._weights = weights
        self._dtype = dtype
        self._device = weights.kernel.device
        self._constants = {
            "KEY_HEADS": sizes.key_heads,
            "HEADS": sizes.heads,
            "KEY": sizes.key_dim,
            "VALUE": sizes.value_dim,
            "KERNEL": sizes.kernel,
            "TAPS": triton.next_power_of_2(sizes.kernel),
            "KEY_BLOCK": max(triton.next_power_of_2(sizes.key_dim), 16),
            "VALUE_BLOCK": max(triton.next_power_of_2(sizes.value_dim), 16),
            "FEW": FEW_ROWS if _multiplies_float32(gpu) else _ALL_ROWS,
        }

    @staticmethod
    def state_bytes(sizes: DeltaSizes, dtype: torch.dtype) -> int:
        """Return the bytes of one sequence's recurrent state in a Gated DeltaNet layer."""
        return sizes.kernel * sizes.mixed * dtype.itemsize + 4 * sizes.heads * sizes.key_dim * sizes.value_dim

    def new_cache(self, slots: int) -> MatrixCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        sizes = self._sizes
        ring = torch.empty(slots, sizes.kernel, sizes.mixed, dtype=self._dtype, device=self._device)
        state = (slots, sizes.heads, sizes.key_dim, sizes.value_dim)
        return MatrixCache(ring, torch.empty(state, dtype=torch.float32, device=self._device))

    def __call__(
        self, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, cache: MatrixCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        """Apply the layer to the T rows of a step, and update `cache` (see `DeltaOp`)."""
        sizes, weights = self._sizes, self._weights
        out = torch.empty(len(mixed), sizes.values, dtype=self._dtype, device=self._device)
        inputs = (mixed, z, b, a, mixed.stride(0), z.stride(0), b.stride(0), a.stride(0))
        shared = (weights.kernel, weights.rate, weights.bias, weights.norm, weights.eps)
        # The kernels read all batch data from device memory, so that the step can be captured as a graph.
        span_tables = _span_tables(batch)
        if batch.most_rows > self._constants["FEW"]:
            advance_chunks(inputs, shared, cache, span_tables, batch, out, self._constants)
        # With 8 warps, each thread holds 64 numbers of a state matrix of 128 by 128 numbers.
        warps = max(1, min(8, self._constants["KEY_BLOCK"] * self._constants["VALUE_BLOCK"] // 2048))
        spans, arguments = len(batch.spans.state_slots), (*inputs, *shared, cache.conv, cache.state, *span_tables, out)
        for first_span, drafts in ((0, False), (batch.singles, True)):
            grid, constants = (sizes.heads, spans - first_span), {"DRAFTS": drafts, **self._constants}
            launch(_advance_rows, grid, *arguments, first_span, warps=warps, **constants)
        self._store_inputs(mixed, cache, batch)
        return out if rows is None else out[rows]

    def _store_inputs(self, mixed: Tensor, cache: MatrixCache, batch: Batch) -> None:
        """Write the last inputs of spans of several rows to the sequences' ring buffers."""
        sizes, spans = self._sizes, len(batch.spans.state_slots) - batch.singles
        # This is a separate kernel, because all programs of the previous kernels must first have read the inputs that
        # this kernel overwrites.
        launch(
            _store_input_rows,
            (triton.cdiv(sizes.mixed, _COLUMNS), spans),
            *(
                mixed,
                mixed.stride(0),
                cache.conv,
                batch.spans.starts,
                batch.spans.prefixes,
                batch.spans.settled,
                batch.spans.state_slots,
            ),
            batch.singles,
            warps=4,
            MIXED=sizes.mixed,
            KERNEL=sizes.kernel,
            BLOCK=_COLUMNS,
        )


def _span_tables(batch: Batch) -> tuple[Tensor, ...]:
    spans = batch.spans
    return spans.starts, spans.prefixes, spans.settled, spans.state_slots


def _multiplies_float32(gpu: GpuProperties) -> bool:
    """Return whether tensor cores multiply float32 (as tf32).

    If they do not, computing row by row is faster than computing in chunks.
    """
    return gpu.tensor_cores and torch.version.hip is None


@triton.jit(do_not_specialize=["first_span"], do_not_specialize_on_alignment=TABLES)
def _advance_rows(
    mixed, z, b, a, mixed_stride, z_stride, b_stride, a_stride, kernel, rate, bias, norm, eps,
    ring, state, starts, prefixes, settled, slots, out, first_span,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KERNEL: tl.constexpr,
    TAPS: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, FEW: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """Apply the layer to short spans' accepted tokens, or, if DRAFTS, to draft tokens."""
    head, span = tl.program_id(0), first_span + tl.program_id(1)
    first, settled_rows = tl.load(starts + span), tl.load(settled + span)
    rows = tl.load(starts + span + 1) - first
    begin, end = (
        (settled_rows, rows) if DRAFTS else (0, tl.where(settled_rows > FEW, 0, tl.minimum(settled_rows, rows)))
    )
    if begin >= end:
        return
    prefix = tl.load(prefixes + span)
    slot = tl.load(slots + span).to(tl.int64)
    served: tl.constexpr = HEADS // KEY_HEADS
    MIXED: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    keys, values = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    key_within, value_within = keys < KEY, values < VALUE
    query_columns = head // served * KEY + keys
    key_columns = KEY_HEADS * KEY + query_columns
    value_columns = 2 * KEY_HEADS * KEY + head * VALUE + values
    ring += slot * KERNEL * MIXED
    state += (slot * HEADS + head) * KEY * VALUE
    known = keys < tl.where(prefix + begin > 0, KEY, 0)
    state_tile = tl.load(state + keys[:, None] * VALUE + values[None, :], known[:, None] & value_within[None, :], 0.0)
    weight = tl.load(norm + values, value_within, 0.0)
    rate_here, bias_here = tl.load(rate + head), tl.load(bias + head)
    for row in range(begin, end):
        at = (first + row).to(tl.int64)
        row_at = mixed + at * mixed_stride
        q = convolved_row(
            row_at, mixed_stride, ring, kernel, query_columns, key_within, prefix + row, prefix, MIXED, KERNEL, TAPS, 0
        )
        k = convolved_row(
            row_at, mixed_stride, ring, kernel, key_columns, key_within, prefix + row, prefix, MIXED, KERNEL, TAPS, 0
        )
        v = convolved_row(
            row_at,
            mixed_stride,
            ring,
            kernel,
            value_columns,
            value_within,
            prefix + row,
            prefix,
            MIXED,
            KERNEL,
            TAPS,
            1,
        )
        q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * KEY**-0.5
        k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
        g, beta = gates(tl.load(a + at * a_stride + head), tl.load(b + at * b_stride + head), rate_here, bias_here)
        state_tile *= tl.exp(g)
        change = beta * (v - tl.sum(k[:, None] * state_tile, 0))
        state_tile += k[:, None] * change[None, :]
        result = tl.sum(q[:, None] * state_tile, 0)
        result *= tl.rsqrt(tl.sum(result * result) / VALUE + eps) * weight
        gate = tl.load(z + at * z_stride + head * VALUE + values, value_within, 0.0).to(tl.float32)
        result *= gate * tl.sigmoid(gate)
        out_at = out + at * HEADS * VALUE + head * VALUE + values
        tl.store(out_at, result.to(out.dtype.element_ty), value_within)
    # Draft tokens may be rejected, so they do not change the recurrent states in memory.
    if not DRAFTS:
        settled_at = state + keys[:, None] * VALUE + values[None, :]
        tl.store(settled_at, state_tile, key_within[:, None] & value_within[None, :])
    if (rows == 1) & (not DRAFTS):
        row_at = mixed + first.to(tl.int64) * mixed_stride
        ring += prefix % KERNEL * MIXED
        tl.store(ring + value_columns, tl.load(row_at + value_columns, value_within), value_within)
        once = keys < tl.where(head % served == 0, KEY, 0)
        tl.store(ring + query_columns, tl.load(row_at + query_columns, once), once)
        tl.store(ring + key_columns, tl.load(row_at + key_columns, once), once)


@triton.jit(do_not_specialize=["singles"], do_not_specialize_on_alignment=TABLES)
def _store_input_rows(
    mixed, mixed_stride, ring, starts, prefixes, settled, slots, singles,
    MIXED: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    span = singles + tl.program_id(1)
    first = tl.load(starts + span)
    if tl.load(starts + span + 1) == first:
        return
    settled_rows, prefix, slot = tl.load(settled + span), tl.load(prefixes + span), tl.load(slots + span)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ring += slot.to(tl.int64) * KERNEL * MIXED + columns
    for back in tl.static_range(1, KERNEL + 1):
        row = settled_rows - back
        within = columns < tl.where(row >= 0, MIXED, 0)
        inputs = tl.load(mixed + (first + row).to(tl.int64) * mixed_stride + columns, within)
        tl.store(ring + (prefix + row) % KERNEL * MIXED, inputs, within)
