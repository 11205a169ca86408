"""What the gated delta rule takes of a row, as the kernels of both of its forms compute it."""
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

TABLES = ["starts", "prefixes", "settled", "slots"]
"""Arguments whose alignment differs from step to step, and must not make another kernel."""


@triton.jit
def convolved(
    here, stride, ring, kernel, columns, within, row, prefix, MIXED: tl.constexpr, KERNEL: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """SiLU of the convolution of some columns of a row, or of several rows; what is not `within` is 0.

    Args:
        here: where the row lies.
        ring: of its sequence; position p lies in row p mod K.
        row: its place in its span, whose first row is at position `prefix`.
    """
    total = tl.zeros(within.shape, tl.float32)
    for back in tl.static_range(KERNEL):
        place = prefix + row - back
        seen = tl.load(here - back * stride + columns, within & (place >= prefix), 0.0)
        seen += tl.load(ring + place % KERNEL * MIXED + columns, within & (place < prefix) & (place >= 0), 0.0)
        total += seen.to(tl.float32) * tl.load(kernel + (KERNEL - 1 - back) * MIXED + columns, within, 0.0)
    return total * tl.sigmoid(total)


@triton.jit
def convolved_row(
    here, stride, ring, kernel, columns, within, place, prefix,
    MIXED: tl.constexpr, KERNEL: tl.constexpr, TAPS: tl.constexpr, AXIS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The same of one row, at position `place`: all that the convolution sees is loaded at once, by different threads.

    Args:
        TAPS: K, or the next power of two.
        AXIS: along which they lie, that of the state along which the columns do not: what is found then has a layout
            that says nothing about the state's. Otherwise the compiler keeps the state in registers twice.
    """
    taps = tl.expand_dims(tl.arange(0, TAPS), 1 - AXIS)
    columns, within = tl.expand_dims(columns, AXIS), tl.expand_dims(within, AXIS)
    places, seen_by = place - taps, (taps < KERNEL) & within
    seen = tl.load(here - taps * stride + columns, seen_by & (places >= prefix), 0.0)
    seen += tl.load(ring + places % KERNEL * MIXED + columns, seen_by & (places < prefix) & (places >= 0), 0.0)
    weight = tl.load(kernel + (KERNEL - 1 - taps) * MIXED + columns, seen_by, 0.0)
    total = tl.sum(seen.to(tl.float32) * weight, AXIS)
    return total * tl.sigmoid(total)


@triton.jit
def gates(a, b, rate, bias) -> tuple[tl.tensor, tl.tensor]:
    """The logarithm of the decay, and beta, of a head in a row or in several, from numbers of any dtype."""
    step = a.to(tl.float32) + bias
    # log(1 + e^-|x|), exact where e^-|x| is next to nothing: the rounding of 1 + y is taken back.
    small = tl.exp(-tl.abs(step))
    grown = 1.0 + small
    log = tl.where(grown == 1.0, small, tl.log(grown) * (small / tl.where(grown == 1.0, 1.0, grown - 1.0)))
    return -rate * (tl.maximum(step, 0.0) + log), tl.sigmoid(b.to(tl.float32))
