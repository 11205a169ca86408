"""Load-time quantization compared with other quantizers, and on groups that are hard to quantize."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from helexa.neuron.weights.quantization_formats import QUANT_FORMATS
from helexa.neuron.weights.quantize import LARGEST, quantize
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor
from neuron.weights.quantization_cases import HARD, heavy_tailed

BY_REFERENCE = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]


def quantized(rows: Tensor, name: str) -> Tensor:
    matrix = quantize(rows, QUANT_FORMATS[name])
    assert isinstance(matrix, GroupwiseTensor)
    return matrix.dequantize()


def error(rows: Tensor, matrix: Tensor) -> float:
    return float((matrix - rows).square().mean().sqrt() / rows.square().mean().sqrt())


@pytest.mark.parametrize("name", BY_REFERENCE)
def test_quantization_error_is_below_that_of_plain_rounding(name: str) -> None:
    rows = heavy_tailed(64, 512)
    kind = GGMLQuantizationType[name.upper()]
    reference = gguf.quants.dequantize(gguf.quants.quantize(rows.numpy(), kind), kind)
    bound = 1.0 if name == "q8_0" else 0.97
    assert error(rows, quantized(rows, name)) < bound * error(rows, torch.from_numpy(reference))


@pytest.mark.parametrize(("name", "most", "widest", "rounds"), [("q4k", 15, 1.0, 20), ("q5k", 31, 0.5, 15)])
def test_quantization_error_is_close_to_that_of_an_exhaustive_search(
    name: str, most: int, widest: float, rounds: int
) -> None:
    """The reference search follows llama.cpp's K types: over five times as many candidates, same scale rounding."""
    rows = heavy_tailed(64, 512)
    groups = rows.view(-1, 32).double()
    scale, low = exhaustive_search(groups, most, widest, rounds)
    unit = (scale.view(-1, 8).amax(1, keepdim=True) / 63).expand(-1, 8).reshape(-1)
    low_unit = (low.view(-1, 8).amin(1, keepdim=True) / 63).expand(-1, 8).reshape(-1)
    scale, low = (scale / unit).round() * unit, (low / low_unit).round() * low_unit
    matrix = ((groups - low[:, None]) / scale[:, None]).round().clamp(0, most) * scale[:, None] + low[:, None]
    assert error(rows, quantized(rows, name)) < 1.015 * error(rows, matrix.view_as(rows).float())


def exhaustive_search(groups: Tensor, most: int, widest: float, rounds: int) -> tuple[Tensor, Tensor]:
    """Return scale and minimum of each group: the best least-squares solution over many candidate code ranges."""
    low, high = groups.amin(1).clamp(max=0), groups.amax(1)
    best = torch.full_like(low, torch.inf)
    scale, minimum = torch.zeros_like(low), low.clone()
    for step in np.linspace(-widest, widest, rounds + 1):
        codes = ((groups - low[:, None]) / (high - low)[:, None] * (most + step)).round().clamp(0, most)
        lines = torch.stack((codes, torch.ones_like(codes)), dim=-1)
        solved = torch.linalg.lstsq(lines, groups[..., None]).solution[..., 0]
        remaining_error = (lines @ solved[..., None])[..., 0].sub(groups).square().sum(1)
        better = (remaining_error < best) & (solved[:, 1] <= 0)
        best = torch.where(better, remaining_error, best)
        scale, minimum = torch.where(better, solved[:, 0], scale), torch.where(better, solved[:, 1], minimum)
    return scale, minimum


@pytest.mark.parametrize("name", QUANT_FORMATS)
def test_quantization_error_of_every_weight_is_at_most_1_point_4_steps(name: str) -> None:
    rows, form = heavy_tailed(40, 768), QUANT_FORMATS[name]
    groups = rows.view(-1, form.group_size)
    step = groups.amax(1).clamp(min=0) - groups.amin(1).clamp(max=0)
    if not form.minimum:
        step = 2 * groups.abs().amax(1)
    remaining_error = (quantized(rows, name).view_as(groups) - groups).abs().amax(1)
    assert (remaining_error <= 1.4 * step / (2**form.bits - 1)).all()


@pytest.mark.parametrize("name", QUANT_FORMATS)
@pytest.mark.parametrize("case", HARD)
def test_quantized_extreme_groups_stay_finite_and_close(name: str, case: str) -> None:
    """A weight changes by less than about one quantization step of the 256 columns around it."""
    rows = HARD[case]()
    matrix = quantized(rows, name)
    assert matrix.isfinite().all()
    stretches = rows.view(len(rows), -1, 256)
    step = stretches.abs().amax(-1, keepdim=True) * 2 / (2 ** QUANT_FORMATS[name].bits - 1)
    smallest = 2**-25 * 128 * 32  # half a float16 step of the unit, times the largest codes
    assert ((matrix.view_as(stretches) - stretches).abs() <= 1.1 * step + smallest).all()


def test_quantized_zeros_stay_zero() -> None:
    for name in QUANT_FORMATS:
        assert not quantized(torch.zeros(3, 256), name).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2 * LARGEST])
def test_non_finite_or_too_large_weights_are_not_quantized(bad: float) -> None:
    rows = heavy_tailed(600, 512)
    rows[-1, -1] = bad
    for form in QUANT_FORMATS.values():
        assert quantize(rows, form) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_of_the_source_does_not_change_the_quantized_result(dtype: torch.dtype) -> None:
    rows = heavy_tailed(20, 256).to(dtype)
    assert torch.equal(quantized(rows, "q4k"), quantized(rows.float(), "q4k"))


@pytest.mark.parametrize("name", QUANT_FORMATS)
def test_stated_bits_per_weight_equal_the_stored_size(name: str) -> None:
    form = QUANT_FORMATS[name]
    matrix = quantize(heavy_tailed(8, 1024), form)
    assert matrix is not None
    scales = [scale for scale in (matrix.scale, matrix.minimum) if scale is not None]
    extra = sum(16 * scale.unit.numel() for scale in scales)
    width = 8 if form.group_size == 16 else 6
    extra += sum(width * scale.codes.numel() for scale in scales if scale.codes is not None)
    assert form.weight_bits == form.bits + extra / matrix.codes.numel()
