"""The gated delta rule for long spans (prefill) in Triton, in chunks of 64 rows.

The function `ops.gated_delta.chunked` explains the algebra. Four kernels run one after another:

1. compute the queries, keys and values of all rows with the convolution
2. solve the equations of each chunk, for any state before the chunk
3. update the state chunk by chunk, and compute the outputs
4. apply the norm and the output gate

A span is the rows of one sequence in the batch. The first chunk of each span starts at its first row. The result of a
sequence therefore does not depend on other sequences in the batch.
"""
# pyright: reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.state_cache import MatrixCache
from helexa.neuron.ops.triton.launch_and_graphs import launch

# Kernel arguments with varying address alignment. Triton must not recompile a kernel if their alignment changes.
TABLES = ["starts", "prefixes", "settled", "slots"]

CHUNK = 64
_VALUES = 32  # state columns per program: small, so that a single sequence uses many programs


@triton.jit
def convolved(
    row_at, stride, ring, kernel, columns, within, row, prefix, MIXED: tl.constexpr, KERNEL: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return the convolution over K tokens and SiLU, for columns of a span's rows.

    The result is 0 outside the mask `within`. Inputs before the position `prefix` come from the ring buffer.

    Args:
        row_at: address of each row's input in the batch.
        ring: address of the sequence's ring buffer. The input of position p is in row p mod K.
        row: index of each row in its span.
    """
    total = tl.zeros(within.shape, tl.float32)
    for back in tl.static_range(KERNEL):
        place = prefix + row - back
        inputs = tl.load(row_at - back * stride + columns, within & (place >= prefix), 0.0)
        inputs += tl.load(ring + place % KERNEL * MIXED + columns, within & (place < prefix) & (place >= 0), 0.0)
        total += inputs.to(tl.float32) * tl.load(kernel + (KERNEL - 1 - back) * MIXED + columns, within, 0.0)
    return total * tl.sigmoid(total)


@triton.jit
def convolved_row(
    row_at, stride, ring, kernel, columns, within, place, prefix,
    MIXED: tl.constexpr, KERNEL: tl.constexpr, TAPS: tl.constexpr, AXIS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the convolution of one row, the position `place` of its sequence.

    Different threads load the K inputs (taps) of a column at the same time. Other arguments are as for `convolved`.

    Args:
        TAPS: K, rounded up to a power of two.
        AXIS: tensor axis of the taps, the axis of the state matrix that `columns` does not use.
    """
    # On another axis, the compiler would keep the state in registers twice, in two layouts.
    taps = tl.expand_dims(tl.arange(0, TAPS), 1 - AXIS)
    columns, within = tl.expand_dims(columns, AXIS), tl.expand_dims(within, AXIS)
    places, tap_mask = place - taps, (taps < KERNEL) & within
    inputs = tl.load(row_at - taps * stride + columns, tap_mask & (places >= prefix), 0.0)
    inputs += tl.load(ring + places % KERNEL * MIXED + columns, tap_mask & (places < prefix) & (places >= 0), 0.0)
    weight = tl.load(kernel + (KERNEL - 1 - taps) * MIXED + columns, tap_mask, 0.0)
    total = tl.sum(inputs.to(tl.float32) * weight, AXIS)
    return total * tl.sigmoid(total)


@triton.jit
def gates(a, b, rate, bias) -> tuple[tl.tensor, tl.tensor]:
    """Return the log of the decay, `-rate * softplus(a + bias)`, and `sigmoid(b)`."""
    step = a.to(tl.float32) + bias
    # softplus(x) = max(x, 0) + log(1 + y) with y = e^-|x|. For small y, the rounding of 1 + y would make the logarithm
    # inexact. The factor y / ((1 + y) - 1) corrects the error.
    small = tl.exp(-tl.abs(step))
    one_plus = 1.0 + small
    log = tl.where(one_plus == 1.0, small, tl.log(one_plus) * (small / tl.where(one_plus == 1.0, 1.0, one_plus - 1.0)))
    return -rate * (tl.maximum(step, 0.0) + log), tl.sigmoid(b.to(tl.float32))


def advance_chunks(
    inputs: tuple[Any, ...],
    shared: tuple[Any, ...],
    cache: MatrixCache,
    places: tuple[Tensor, ...],
    batch: Batch,
    out: Tensor,
    constants: dict[str, int],
) -> None:
    """Apply the gated delta rule to the rows with accepted tokens in all long spans.

    A span is long if it has more than `constants["FEW"]` such rows. The function updates `cache.state`, but not
    `cache.conv`.

    Args:
        inputs: the tensors `mixed`, `z`, `b` and `a` of `DeltaOp.__call__`, then their row strides.
        shared: the weights `kernel`, `rate`, `bias`, `norm` and `eps` of `DeltaWeights`.
        places: the tensors `starts`, `prefixes`, `settled` and `state_slots` of `SpanTable`.
        out: [rows, Hv * Dv], of which the rows of the long spans are written.
        constants: compile-time constants of the kernels.
    """
    mixed, z, b, a, mixed_stride, z_stride, b_stride, a_stride = inputs
    kernel, rate, bias, norm, eps = shared
    rows, heads = len(out), constants["HEADS"]
    key, value = constants["KEY"], constants["VALUE"]
    key_block, value_block = constants["KEY_BLOCK"], constants["VALUE_BLOCK"]

    def empty(*shape: int, dtype: torch.dtype = out.dtype) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=out.device)

    projected = empty(2 * constants["KEY_HEADS"] * key + heads * value)
    wanted, stale, qk_scores = empty(heads, value), empty(heads, key), empty(heads, CHUNK)
    decay_before, decay_after = empty(heads, dtype=torch.float32), empty(heads, dtype=torch.float32)
    spans, chunks = len(batch.spans.state_slots) - batch.singles, triton.cdiv(batch.most_rows, CHUNK)
    sizes = {name: constants[name] for name in ("KEY_HEADS", "HEADS", "KEY", "VALUE", "FEW")} | {"CHUNK": CHUNK}
    precision = "tf32x3" if out.dtype == torch.float32 else "tf32"
    launch(
        _prepare_rows,
        (2 * constants["KEY_HEADS"] + heads, chunks, spans),
        *(mixed, mixed_stride, kernel, cache.conv, *places, batch.singles, projected),
        warps=4,
        KERNEL=constants["KERNEL"],
        BLOCK=max(key_block, value_block),
        **sizes,
    )
    launch(
        _solve_chunks,
        (heads, chunks, spans),
        *(
            projected,
            b,
            a,
            b_stride,
            a_stride,
            rate,
            bias,
            *places[:3],
            batch.singles,
            wanted,
            stale,
            qk_scores,
            decay_before,
            decay_after,
        ),
        warps=8,
        KEY_BLOCK=key_block,
        VALUE_BLOCK=value_block,
        LEVELS=CHUNK.bit_length() - 1,
        **sizes,
        PRECISION=precision,
    )
    tile = min(_VALUES, value_block)
    launch(
        _carry_states,
        (triton.cdiv(value, tile), heads, spans),
        *(projected, wanted, stale, qk_scores, decay_before, decay_after, cache.state, *places, batch.singles),
        warps=8,
        KEY_BLOCK=key_block,
        TILE=tile,
        **sizes,
        PRECISION=precision,
    )
    launch(
        _gate_rows,
        (heads, chunks, spans),
        *(wanted, z, z_stride, norm, eps, *places[:3], batch.singles, out),
        warps=4,
        VALUE_BLOCK=value_block,
        **sizes,
    )


@triton.jit
def _rows_of(starts, settled, span, chunk, CHUNK: tl.constexpr, FEW: tl.constexpr):
    """Return the indexes of the rows of a chunk, and a mask.

    Returns:
        The index of the chunk's first row in the batch, the index of each row in the span, and a mask of the rows with
        accepted tokens. The mask is empty if the span is short.
    """
    first, settled_rows = tl.load(starts + span), tl.load(settled + span)
    settled_rows = tl.where((settled_rows > FEW) & (tl.load(starts + span + 1) > first), settled_rows, 0)
    row = chunk * CHUNK + tl.arange(0, CHUNK)
    return (first + chunk * CHUNK).to(tl.int64), row, row < settled_rows


@triton.jit(do_not_specialize=["singles"], do_not_specialize_on_alignment=TABLES)
def _prepare_rows(
    mixed, mixed_stride, kernel, ring, starts, prefixes, settled, slots, singles, projected,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    FEW: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a head's queries, keys or values of a chunk's rows to `projected`."""
    head, span = tl.program_id(0), singles + tl.program_id(2)
    at, row, exists = _rows_of(starts, settled, span, tl.program_id(1), CHUNK, FEW)
    if tl.max(exists.to(tl.int32)) == 0:
        return
    MIXED: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    is_key = head < 2 * KEY_HEADS
    start = tl.where(is_key, head * KEY, 2 * KEY_HEADS * KEY + (head - 2 * KEY_HEADS) * VALUE)
    numbers, places = tl.arange(0, BLOCK), tl.arange(0, CHUNK)
    columns = (start + numbers)[None, :]
    within = exists[:, None] & (numbers < tl.where(is_key, KEY, VALUE))[None, :]
    ring += tl.load(slots + span).to(tl.int64) * KERNEL * MIXED
    row_at = mixed + at * mixed_stride + places[:, None] * mixed_stride
    x = convolved(
        row_at, mixed_stride, ring, kernel, columns, within, row[:, None], tl.load(prefixes + span), MIXED, KERNEL
    )
    # Queries and keys get the length 1. Queries are also divided by the square root of the key width.
    length = tl.rsqrt(tl.sum(x * x, 1) + 1e-6) * tl.where(head < KEY_HEADS, KEY**-0.5, 1.0)
    x *= tl.where(is_key, length, 1.0)[:, None]
    tl.store(projected + at * MIXED + places[:, None] * MIXED + columns, x.to(projected.dtype.element_ty), within)


@triton.jit(do_not_specialize=["singles"], do_not_specialize_on_alignment=TABLES)
def _solve_chunks(
    projected, b, a, b_stride, a_stride, rate, bias, starts, prefixes, settled, singles, wanted, stale,
    qk_scores, decay_before, decay_after,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    FEW: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Solve a chunk's equations for a value head, for any state S before the chunk.

    The kernel writes `wanted`, `stale`, `qk_scores`, `decay_before` and `decay_after`. The next kernel then computes,
    for the queries q of the rows:

        state changes of the rows = wanted - stale S
        outputs of the rows = decay_before q S + qk_scores (wanted - stale S)

    `decay_before` is the decay of the state from the start of the chunk to each row. `decay_after` is the decay from
    each row to the end of the chunk.
    """
    head, span = tl.program_id(0), singles + tl.program_id(2)
    at, _, exists = _rows_of(starts, settled, span, tl.program_id(1), CHUNK, FEW)
    if tl.max(exists.to(tl.int32)) == 0:
        return
    MIXED: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    keys, values, places = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK), tl.arange(0, CHUNK)
    key_within = exists[:, None] & (keys < KEY)[None, :]
    value_within = exists[:, None] & (values < VALUE)[None, :]
    a, b = a + at * a_stride + head, b + at * b_stride + head
    projected, of_head = projected + at * MIXED, at * HEADS + head
    of_row = tl.load(a + places * a_stride, exists, 0.0), tl.load(b + places * b_stride, exists, 0.0)
    g, beta = gates(of_row[0], of_row[1], tl.load(rate + head), tl.load(bias + head))
    g, beta = tl.where(exists, g, 0.0), tl.where(exists, beta, 0.0)
    later = places[:, None] > places[None, :]
    between = tl.where(later, g[:, None], 0.0)
    tl.store(decay_after + of_head + places * HEADS, tl.exp(tl.sum(between, 0)), exists)
    decay = tl.exp(tl.cumsum(g, 0))
    tl.store(decay_before + of_head + places * HEADS, decay, exists)
    # Decay from one row to a later row. The sums start at the first of the two rows, because differences of sums from
    # the start of the chunk lose the precision of small decays.
    between = tl.exp(tl.cumsum(between, 0))

    of_keys = projected + head // (HEADS // KEY_HEADS) * KEY + places[:, None] * MIXED + keys[None, :]
    q = tl.load(of_keys, key_within, 0.0)
    k = tl.load(of_keys + KEY_HEADS * KEY, key_within, 0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores = tl.where(places[:, None] >= places[None, :], scores * between, 0.0)
    tl.store(
        qk_scores + of_head * CHUNK + places[:, None] * (HEADS * CHUNK) + places[None, :],
        scores.to(qk_scores.dtype.element_ty),
        exists[:, None],
    )
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * beta[:, None]
    system = tl.where(later, system * between, 0.0)
    # Invert 1 + system: first the blocks on the diagonal, then pairs of inverted blocks, until one block is left. This
    # is forward substitution by blocks, which stays exact if keys repeat.
    distance = places[:, None] ^ places[None, :]
    inverse = tl.where(distance == 0, 1.0, tl.where(distance == 1, -system, 0.0))
    for level in range(1, LEVELS):
        coupling = tl.where(distance >> level == 1, -system, 0.0)
        coupling = tl.dot(coupling, inverse, input_precision=PRECISION)
        inverse = tl.dot(inverse, coupling, inverse, input_precision=PRECISION)
    of_values = projected + 2 * KEY_HEADS * KEY + head * VALUE + places[:, None] * MIXED + values[None, :]
    v = tl.load(of_values, value_within, 0.0).to(tl.float32) * beta[:, None]
    result = tl.dot(inverse, v, input_precision=PRECISION).to(wanted.dtype.element_ty)
    tl.store(wanted + of_head * VALUE + places[:, None] * (HEADS * VALUE) + values[None, :], result, value_within)
    k = tl.load(of_keys + KEY_HEADS * KEY, key_within, 0.0).to(tl.float32) * (beta * decay)[:, None]
    result = tl.dot(inverse, k, input_precision=PRECISION).to(stale.dtype.element_ty)
    tl.store(stale + of_head * KEY + places[:, None] * (HEADS * KEY) + keys[None, :], result, key_within)


@triton.jit(do_not_specialize=["singles"], do_not_specialize_on_alignment=TABLES)
def _carry_states(
    projected, wanted, stale, qk_scores, decay_before, decay_after, state, starts, prefixes, settled, slots, singles,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    FEW: tl.constexpr, KEY_BLOCK: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update columns of a head's state with a span's chunks; outputs replace `wanted`."""
    head, span = tl.program_id(1), singles + tl.program_id(2)
    first, settled_rows = tl.load(starts + span), tl.load(settled + span)
    if (settled_rows <= FEW) | (tl.load(starts + span + 1) == first):
        return
    MIXED: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    keys, places = tl.arange(0, KEY_BLOCK), tl.arange(0, CHUNK)
    values = tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + span).to(tl.int64)
    state_at = state + (slot * HEADS + head) * KEY * VALUE + keys[:, None] * VALUE + values[None, :]
    within = (keys < KEY)[:, None] & (values < VALUE)[None, :]
    known = keys < tl.where(tl.load(prefixes + span) > 0, KEY, 0)
    state_tile = tl.load(state_at, known[:, None] & (values < VALUE)[None, :], 0.0)
    for chunk in range(tl.cdiv(settled_rows, CHUNK)):
        at, _, exists = _rows_of(starts, settled, span, chunk, CHUNK, FEW)
        key_within = exists[:, None] & (keys < KEY)[None, :]
        value_within = exists[:, None] & (values < VALUE)[None, :]
        of_head = at * HEADS + head
        of_keys = projected + at * MIXED + head // (HEADS // KEY_HEADS) * KEY + places[:, None] * MIXED + keys[None, :]
        wanted_at = wanted + of_head * VALUE + places[:, None] * (HEADS * VALUE) + values[None, :]
        decay = tl.load(decay_before + of_head + places * HEADS, exists, 0.0)
        stale_at = stale + of_head * KEY + places[:, None] * (HEADS * KEY) + keys[None, :]
        stale_rows = tl.load(stale_at, key_within, 0.0).to(tl.float32)
        change = tl.load(wanted_at, value_within, 0.0) - tl.dot(stale_rows, state_tile, input_precision=PRECISION)
        q = tl.load(of_keys, key_within, 0.0) * decay[:, None]
        result = tl.dot(q, state_tile, input_precision=PRECISION)
        qk_scores_at = qk_scores + of_head * CHUNK + places[:, None] * (HEADS * CHUNK) + places[None, :]
        scores = tl.load(qk_scores_at, exists[:, None], 0.0).to(tl.float32)
        result = tl.dot(scores, change, result, input_precision=PRECISION)
        # The outputs of the rows replace `wanted`, which is no longer needed.
        tl.store(wanted_at, result.to(wanted.dtype.element_ty), value_within)
        k = tl.load(of_keys + KEY_HEADS * KEY, key_within, 0.0)
        k *= tl.load(decay_after + of_head + places * HEADS, exists, 0.0)[:, None]
        last = tl.minimum(settled_rows - chunk * CHUNK, CHUNK) - 1
        state_tile *= tl.load(decay_before + of_head + last * HEADS)
        state_tile = tl.dot(tl.trans(k), change, state_tile, input_precision=PRECISION)
    tl.store(state_at, state_tile, within)


@triton.jit(do_not_specialize=["singles"], do_not_specialize_on_alignment=TABLES)
def _gate_rows(
    result, z, z_stride, norm, eps, starts, prefixes, settled, singles, out,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    FEW: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    head, span = tl.program_id(0), singles + tl.program_id(2)
    at, _, exists = _rows_of(starts, settled, span, tl.program_id(1), CHUNK, FEW)
    if tl.max(exists.to(tl.int32)) == 0:
        return
    values = tl.arange(0, VALUE_BLOCK)
    within = exists[:, None] & (values < VALUE)[None, :]
    places = tl.arange(0, CHUNK)[:, None]
    of_head, place = (at * HEADS + head) * VALUE, places * (HEADS * VALUE) + values[None, :]
    x = tl.load(result + of_head + place, within, 0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / VALUE + eps)[:, None] * tl.load(norm + values, values < VALUE, 0.0)[None, :]
    gate = tl.load(z + at * z_stride + head * VALUE + places * z_stride + values[None, :], within, 0.0).to(tl.float32)
    tl.store(out + of_head + place, (x * gate * tl.sigmoid(gate)).to(out.dtype.element_ty), within)
