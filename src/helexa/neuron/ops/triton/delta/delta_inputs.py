"""Inputs of the gated delta rule for a row, shared by the row kernel and the chunk kernels."""
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

TABLES = ["starts", "prefixes", "settled", "slots"]
"""Arguments whose alignment varies between steps; kernels must not be recompiled for their alignment."""


@triton.jit
def convolved(
    row_at, stride, ring, kernel, columns, within, row, prefix, MIXED: tl.constexpr, KERNEL: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return SiLU of the convolution of some columns, for one or several rows; 0 outside the mask `within`.

    Args:
        row_at: address of the row in the batch.
        ring: ring buffer of the sequence; position p is in row p mod K.
        row: index of the row in its span, whose first row has position `prefix`.
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
    """Return the convolution of one row at position `place`; different threads load all taps at once.

    Args:
        TAPS: K, rounded up to a power of two.
        AXIS: axis of the taps, which is the axis of the state that the columns do not use. With this axis, the layout
            of the result does not constrain the layout of the state. Otherwise the compiler keeps the state in
            registers twice.
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
    """Return the logarithm of the decay, and beta, for inputs of any dtype."""
    step = a.to(tl.float32) + bias
    # Compute log(1 + e^-|x|) accurately for small e^-|x| by correcting the rounding of 1 + y.
    small = tl.exp(-tl.abs(step))
    one_plus = 1.0 + small
    log = tl.where(one_plus == 1.0, small, tl.log(one_plus) * (small / tl.where(one_plus == 1.0, 1.0, one_plus - 1.0)))
    return -rate * (tl.maximum(step, 0.0) + log), tl.sigmoid(b.to(tl.float32))
