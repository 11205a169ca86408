"""Functions that compute the inputs of the gated delta rule in the kernels for decode and prefill."""
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

TABLES = ["starts", "prefixes", "settled", "slots"]
"""Kernel arguments with varying address alignment. Triton must not recompile a kernel if their alignment changes."""


@triton.jit
def convolved(
    row_at, stride, ring, kernel, columns, within, row, prefix, MIXED: tl.constexpr, KERNEL: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return the convolution over K tokens, followed by SiLU, for some columns of one or several rows of a span.

    A span is the rows of one sequence in the batch. The result is 0 outside the mask `within`.

    Args:
        row_at: address of each row's input in the batch.
        ring: address of the sequence's ring buffer with earlier inputs. The input of position p is in row p mod K.
        row: index of each row in its span.
        prefix: position of the span's first row.
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
    """Return the convolution over K tokens, followed by SiLU, for some columns of the row at position `place`.

    Different threads load the K inputs (taps) of a column at the same time.

    Args:
        row_at: address of the row's input in the batch.
        ring: address of the sequence's ring buffer with earlier inputs. The input of position p is in row p mod K.
        prefix: position of the first row of the sequence in this batch. Earlier inputs are in the ring buffer.
        TAPS: K, rounded up to a power of two.
        AXIS: tensor axis of the taps. Pass the axis of the state matrix that `columns` does not use. Otherwise the
            compiler keeps the state in registers twice, in two layouts.
    """
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
    """Return the logarithm of the decay, `-rate * softplus(a + bias)`, and beta, `sigmoid(b)`, in float32."""
    step = a.to(tl.float32) + bias
    # Compute log(1 + e^-|x|) accurately for small e^-|x| by correcting the rounding of 1 + y.
    small = tl.exp(-tl.abs(step))
    one_plus = 1.0 + small
    log = tl.where(one_plus == 1.0, small, tl.log(one_plus) * (small / tl.where(one_plus == 1.0, 1.0, one_plus - 1.0)))
    return -rate * (tl.maximum(step, 0.0) + log), tl.sigmoid(b.to(tl.float32))
