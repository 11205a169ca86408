"""Load-time quantization in plain torch; the oracle for faster implementations.

Rounding gives the codes. Least squares over the rounded codes of several starting points gives the scales, as in
llama.cpp for its K types (`make_qkx2_quants`, `make_qx_quants` in ggml-quants.c). Unlike in llama.cpp, all columns have
the same weight, which gives better results on real weights.
"""

from functools import lru_cache

import torch
from torch import Tensor

from helexa.neuron.weights.formats import GroupScale, GroupwiseTensor
from helexa.neuron.weights.quantization.quant_form import QuantForm

STEPS = (-1.0, -0.4, 0.2, 0.8)
"""Starting points: amounts added to the number of levels to choose the first scale."""

LARGEST = 32768.0
"""Larger weights would not fit float16 scales."""

_CHUNK = 1 << 18  # weights processed at once, sized for the processor's cache
_LARGE_CHUNK = 1 << 22  # larger on a GPU, where small operations are bound by launches


def quantize(weight: Tensor, form: QuantForm) -> GroupwiseTensor | None:
    """Quantize a matrix to `form`.

    Args:
        weight: floating point [N, K]; `form.fits(K)` must hold. For a weight on torch's meta device, the result is on
            the meta device, too.

    Returns:
        None if a weight is not finite or larger than `LARGEST`.
    """
    if weight.is_meta:
        return _on_meta(form, weight.shape)
    chunk = _CHUNK if weight.device.type == "cpu" else _LARGE_CHUNK
    parts = [_rows(rows.float(), form) for rows in weight.split(max(chunk // weight.shape[1], 1))]
    found = [part for part in parts if part is not None]
    return _stacked(found) if len(found) == len(parts) else None


@lru_cache
def _on_meta(form: QuantForm, shape: torch.Size) -> GroupwiseTensor:
    row = _rows(torch.zeros(1, shape[1]), form)
    assert row is not None
    return row.on_meta(shape[0])


def _rows(rows: Tensor, form: QuantForm) -> GroupwiseTensor | None:
    if not bool(rows.abs().amax() <= LARGEST):
        return None
    groups = rows.unflatten(-1, (-1, form.group_size))  # [N, G, group_size]
    stretches = rows.shape[1] // form.stretch if form.stretch else None
    if form.minimum:
        scale, low = _line(groups, 2**form.bits - 1)
        scale, minimum = _scale(scale, stretches, 63), _scale(low, stretches, 63)
        groups = groups - minimum.values()[..., None]
    else:
        scale, minimum = _scale(_ray(groups, form.bits), stretches, -128), None
    codes = (groups * _inverse(scale.values())[..., None]).round_().add_(form.zero).clamp_(0, 2**form.bits - 1)
    return GroupwiseTensor(codes.flatten(-2).byte(), scale, minimum, form.zero, form.bits, form.group_size)


def _line(groups: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Fit scale and minimum (at most 0) of each group [N, G, n], for codes from 0 to `most`."""
    low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1)
    count, total = groups.shape[-1], groups.sum(-1)
    slope = _inverse(high - low)
    scale, minimum, best = torch.zeros_like(low), low.clone(), torch.zeros_like(low)
    for step in STEPS:
        codes = ((groups - low[..., None]) * (slope * (most + step))[..., None]).round_().clamp_(0, most)
        sum_l, sum_ll, sum_lx = codes.sum(-1), codes.square().sum(-1), (codes * groups).sum(-1)
        level = _inverse(count * sum_ll - sum_l * sum_l)
        m = (sum_ll * total - sum_l * sum_lx) * level
        s = (count * sum_lx - total * sum_l) * level
        through = (m > 0) | ((level == 0) & (sum_ll > 0))  # the fitted line goes through 0
        m = m.masked_fill_(through, 0)
        s = torch.where(through, (sum_lx * _inverse(sum_ll)).clamp_(min=0), s)
        explained = s * sum_lx + m * total  # part of the sum of squares
        better = explained > best
        best = torch.where(better, explained, best)
        scale, minimum = torch.where(better, s, scale), torch.where(better, m, minimum)
    return scale, minimum


def _ray(groups: Tensor, bits: int) -> Tensor:
    """Fit the scale, of either sign, of each group [N, G, n], for signed codes."""
    peak = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    if bits == 8:  # a search would not improve 8-bit codes
        return peak.abs() / 127
    least = 2 ** (bits - 1)
    scale, best = torch.zeros_like(peak), torch.zeros_like(peak)
    for step in STEPS:
        codes = (groups * (-(least + step) * _inverse(peak))[..., None]).round_().clamp_(-least, least - 1)
        sum_ll, sum_lx = codes.square().sum(-1), (codes * groups).sum(-1)
        s = sum_lx * _inverse(sum_ll)
        explained = s * sum_lx
        better = explained > best
        best, scale = torch.where(better, explained, best), torch.where(better, s, scale)
    return scale


def _scale(values: Tensor, stretches: int | None, most: int) -> GroupScale:
    """Encode `values` [N, G] as float16, or as multiples of one float16 unit per stretch, at most `most`."""
    if stretches is None:
        return GroupScale(values.half())
    values = values.unflatten(-1, (stretches, -1))
    peak = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    codes = (values * (most * _inverse(peak))).round_().clamp_(max=most if most > 0 else -most - 1)
    return GroupScale((peak / most).half().squeeze(-1), codes.flatten(-2).to(torch.uint8 if most > 0 else torch.int8))


def _inverse(values: Tensor) -> Tensor:
    return torch.where(values == 0, 0, 1 / values)


def _stacked(parts: list[GroupwiseTensor]) -> GroupwiseTensor:
    if len(parts) == 1:
        return parts[0]
    first = parts[0]

    def scales(found: list[GroupScale]) -> GroupScale:
        codes = [part.codes for part in found if part.codes is not None]
        return GroupScale(torch.cat([part.unit for part in found]), torch.cat(codes) if codes else None)

    minima = [part.minimum for part in parts if part.minimum is not None]
    return GroupwiseTensor(
        torch.cat([part.codes for part in parts]),
        scales([part.scale for part in parts]),
        scales(minima) if minima else None,
        first.zero,
        first.bits,
        first.group_size,
    )
