"""What the native kernels are to compute, by definition and in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from helexa.neuron.ops.attention_kind import AttentionKind
from helexa.neuron.weights.formats import GroupwiseTensor, Weight
from neuron.ops import random_weights

GROUP = 32
LARGEST = {16: 127.0 * 256 + 127, 8: 127.0}
"""What the largest of a group becomes, by bits."""
EPSILON = 2.0**-24
"""Half the distance from 1 to the next float32."""
NOTHING = 1e-25
"""Results below this may count as nought: inverses of their scales are beyond float32."""
_SMALLEST = 1e-36


@dataclass(frozen=True)
class Product:
    """A product [T, N].

    Attributes:
        exact: of the rounded activations and the weights.
        tolerance: what float32 sums in any order may be off.
        unrounded: of the activations as they came.
        rounding: how far `exact` may be from that.
    """

    exact: Tensor
    tolerance: Tensor
    unrounded: Tensor
    rounding: Tensor


def product(x: Tensor, weight: Weight, bits: int = 16) -> Product:
    """x [T, K] times weight [N, K]: a scale for each 32 columns of x, or bfloat16 where the weight is not quantised."""
    matrix = random_weights.plain(weight)
    if isinstance(weight, GroupwiseTensor):
        scale, codes = rounded_to_codes(x, bits)
        rounded = (scale[..., None] * codes).flatten(-2)
        steps, size_of_terms = x.shape[1] // GROUP, _size_of_terms(rounded, weight)
        # The nearest step is at most half a step away.
        rounding = 0.5 * scale.repeat_interleave(GROUP, 1) @ matrix.abs().T
    else:
        rounded = x.bfloat16().double()
        steps, size_of_terms = x.shape[1], rounded.abs() @ matrix.abs().T
        rounding = 2.0**-9 * x.double().abs() @ matrix.abs().T
    tolerance = (steps + 4) * EPSILON * size_of_terms + NOTHING
    return Product(rounded @ matrix.T, tolerance, x.double() @ matrix.T, rounding * (1 + 2.0**-20) + NOTHING)


def _size_of_terms(x: Tensor, weight: GroupwiseTensor) -> Tensor:
    """Sum of the sizes of what is added up, [T, N]: a group's codes times its scale, and apart from them its offset."""
    groups, scale = x.unflatten(-1, (-1, weight.group_size)), weight.scale.values().double()
    # With a table, or for halves of a group, the zero is subtracted from sums of whole numbers, which is exact.
    whole = weight.table is not None or weight.group_size < GROUP
    numbers = weight.codes.double() if weight.table is None else weight.table.double()[weight.codes.int()]
    numbers = (numbers - whole * weight.zero).unflatten(-1, (-1, weight.group_size))
    products = torch.einsum("tgk,ngk->tgn", groups, numbers * scale[..., None]).abs().sum(1)
    if weight.minimum is None and whole:
        return products
    offset = scale * weight.zero if weight.minimum is None else weight.minimum.values().double()
    return products + groups.sum(-1).abs() @ offset.abs().T


def rounded_to_codes(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales [T, G] and whole numbers [T, G, 32]."""
    groups = x.unflatten(-1, (-1, GROUP))
    peak = groups.abs().amax(-1)
    inverse = torch.where(peak > _SMALLEST, torch.tensor(LARGEST[bits]) / peak, 0.0)
    return (peak / LARGEST[bits]).double(), (groups * inverse[..., None]).round().double()


def attention(query: Tensor, keys: Tensor, values: Tensor, kind: AttentionKind | None = None) -> tuple[Tensor, Tensor]:
    """Softmax attention of one position's query [heads, D] over keys and values [L, kv_heads, D], the last its own.

    Returns:
        The result [heads, D], and the same with all values taken positive, which is the size of what was summed.
    """
    kind = kind or AttentionKind(query.shape[-1] ** -0.5)
    group = query.shape[0] // keys.shape[1]
    keys, values = (part[-(kind.window or 0) :].double().repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("hd,lhd->hl", query.double(), keys) * kind.scale
    beside = torch.empty(len(query), 0) if kind.sinks is None else kind.sinks[:, None]
    weights = torch.cat((scores, beside.double()), 1).softmax(-1)[:, : len(keys)]
    return torch.einsum("hl,lhd->hd", weights, values), torch.einsum("hl,lhd->hd", weights, values.abs())
