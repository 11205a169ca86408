"""Definitions of what the native kernels compute, in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from helexa.neuron.ops.batch import AttentionKind
from helexa.neuron.ops.kernel_header import MIXED
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor, Weight
from neuron.ops import random_weights

GROUP = 32
LARGEST = {16: 127.0 * 256 + 127, 8: 127.0}
"""The code of the largest value of a group, by bits."""
FITTED, TOO_LARGE, SAMPLED = 3.5, 7.0, 4
"""Multiples of the mean magnitude of a row, of which one of `SAMPLED` groups is measured.

The scale of a group fits all its numbers into 8 bits. If one of them is at least `TOO_LARGE` times the mean, the scale
fits only numbers up to `FITTED` times the mean.
"""
EPSILON = 2.0**-24
"""Half the distance from 1 to the next float32."""
NOTHING = 1e-25
"""Results below this may become 0: the inverses of their scales overflow float32."""
_SMALLEST = 1e-36


@dataclass(frozen=True)
class Product:
    """The expected product [T, N] and its error bounds, each [T, N].

    Attributes:
        exact: The product of the rounded activations and the weights.
        tolerance: How far float32 sums may deviate from `exact`, for any order of summation.
        unrounded: The product of the activations before rounding and the weights.
        rounding: How far `exact` may deviate from `unrounded`.
    """

    exact: Tensor
    tolerance: Tensor
    unrounded: Tensor
    rounding: Tensor


def product(x: Tensor, weight: Weight, bits: int = MIXED) -> Product:
    """Return x [T, K] times weight [N, K].

    Activations are rounded to codes with one scale per 32 columns, or to bfloat16 if the weight is not quantized.
    """
    matrix = random_weights.plain(weight)
    if isinstance(weight, GroupwiseTensor):
        scale, codes = rounded_to_codes(x, bits)
        rounded = (scale[..., None] * codes).flatten(-2)
        steps, size_of_terms = x.shape[1] // GROUP, _size_of_terms(rounded, weight)
        # Rounding to the nearest code is off by at most half a scale.
        rounding = 0.5 * scale.repeat_interleave(GROUP, 1) @ matrix.abs().T
    else:
        rounded = x.bfloat16().double()
        steps, size_of_terms = x.shape[1], rounded.abs() @ matrix.abs().T
        rounding = 2.0**-9 * x.double().abs() @ matrix.abs().T
    tolerance = (steps + 4) * EPSILON * size_of_terms + NOTHING
    return Product(rounded @ matrix.T, tolerance, x.double() @ matrix.T, rounding * (1 + 2.0**-20) + NOTHING)


def _size_of_terms(x: Tensor, weight: GroupwiseTensor) -> Tensor:
    """Return the sum of the absolute values of the terms, [T, N]. Codes and offsets are separate terms."""
    groups, scale = x.unflatten(-1, (-1, weight.group_size)), weight.scale.values().double()
    # With a table, few bits, or groups of fewer than 32, kernels subtract the zero in integer sums, which is exact.
    exact_zero = weight.table is not None or weight.bits < 4 or weight.group_size < GROUP
    numbers = weight.codes.double() if weight.table is None else weight.table.double()[weight.codes.int()]
    numbers = (numbers - exact_zero * weight.zero).unflatten(-1, (-1, weight.group_size))
    products = torch.einsum("tgk,ngk->tgn", groups, numbers * scale[..., None]).abs().sum(1)
    if weight.minimum is None and exact_zero:
        return products
    offset = scale * weight.zero if weight.minimum is None else weight.minimum.values().double()
    return products + groups.sum(-1).abs() @ offset.abs().T


def rounded_to_codes(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return scales [T, G] and integer codes [T, G, 32]."""
    groups = x.unflatten(-1, (-1, GROUP))
    peak = groups.abs().amax(-1)
    scale = peak * torch.tensor(1 / LARGEST[bits or 16])
    if bits == MIXED:
        sampled = groups[..., ::SAMPLED, :].abs().flatten(-2)
        limit = (FITTED * _sum_in_float32(sampled) / sampled.shape[-1])[..., None]
        fitted = torch.where(peak < limit * (TOO_LARGE / FITTED), peak, limit)
        scale = torch.maximum(scale, fitted * torch.tensor(1 / LARGEST[8]))
    inverse = torch.where(peak > _SMALLEST, 1 / scale, 0.0)
    return scale.double(), (groups * inverse[..., None]).round().double()


def _sum_in_float32(x: Tensor) -> Tensor:
    """Return the sums of the rows of x [T, K], added in the order of the kernels."""
    lanes = torch.zeros(*x.shape[:-1], 16)
    for part in x.split(16, -1):
        lanes = lanes + part
    quarters = lanes[..., :8] + lanes[..., 8:]
    quarters = quarters[..., :4] + quarters[..., 4:]
    return (quarters[..., 0] + quarters[..., 2]) + (quarters[..., 1] + quarters[..., 3])


def attention(query: Tensor, keys: Tensor, values: Tensor, kind: AttentionKind | None = None) -> tuple[Tensor, Tensor]:
    """Softmax attention of one query [heads, D] over keys and values [L, kv_heads, D]; the query is at position L - 1.

    Returns:
        The result [heads, D], and the result with the absolute values of V, which bounds the rounding error.
    """
    kind = kind or AttentionKind(query.shape[-1] ** -0.5)
    heads_per_kv = query.shape[0] // keys.shape[1]
    keys, values = (x[-(kind.window or 0) :].double().repeat_interleave(heads_per_kv, 1) for x in (keys, values))
    scores = torch.einsum("hd,lhd->hl", query.double(), keys) * kind.scale
    scores = scores if kind.cap is None else kind.cap * (scores / kind.cap).tanh()
    sinks = torch.empty(len(query), 0) if kind.sinks is None else kind.sinks[:, None]
    weights = torch.cat((scores, sinks.double()), 1).softmax(-1)[:, : len(keys)]
    return torch.einsum("hl,lhd->hd", weights, values), torch.einsum("hl,lhd->hd", weights, values.abs())
