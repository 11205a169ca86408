"""Quantization into tiles by the native kernels compared with quantization in torch."""

import pytest
import torch
from torch import Tensor

from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.weights.quantization_formats import QUANT_FORMATS
from helexa.neuron.weights.quantize import quantize
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor
from neuron.weights.quantization_cases import HARD, heavy_tailed


def read_back(ops: NativeOps, weight: Tensor, name: str) -> Tensor:
    matrix = ops.matrix(weight, QUANT_FORMATS[name])
    assert matrix.number is not None
    return ops.embedding(matrix, torch.arange(len(weight), dtype=torch.int32)).clone()


def expected(weight: Tensor, name: str) -> Tensor:
    result = quantize(weight, QUANT_FORMATS[name])
    assert isinstance(result, GroupwiseTensor)
    return result.dequantize()


def holds(ops: NativeOps, weight: Tensor, name: str) -> None:
    """Assert that nearly all weights equal torch's. Ties and last bits may differ, but the error must not grow."""
    result, reference = read_back(ops, weight, name), expected(weight, name)
    assert (result == reference).float().mean() > 0.95
    error, bound = ((each - weight.float()).double().square().mean() for each in (result, reference))
    assert error <= bound * 1.001


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", QUANT_FORMATS)
def test_natively_quantized_tiles_match_quantization_by_torch(native: NativeOps, name: str, dtype: torch.dtype) -> None:
    for rows, columns in ((1, 256), (16, 512), (50, 1280)):
        holds(native, heavy_tailed(rows, columns).to(dtype), name)


@pytest.mark.parametrize("columns", [32, 96, 288])
@pytest.mark.parametrize("name", [form.name for form in QUANT_FORMATS.values() if form.stretch is None])
def test_native_quantization_of_an_odd_number_of_rows_matches_torch(native: NativeOps, name: str, columns: int) -> None:
    holds(native, heavy_tailed(50, columns).bfloat16(), name)


@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("name", QUANT_FORMATS)
def test_native_quantization_of_extreme_groups_matches_torch(native: NativeOps, name: str, case: str) -> None:
    weight = HARD[case]()
    result, reference = read_back(native, weight, name), expected(weight, name)
    assert result.isfinite().all()
    error, bound = ((each - weight).double().square().mean() for each in (result, reference))
    rounding = (
        2**-11 * weight.abs().max().double()
    ) ** 2  # rounding of float16 scales; it dominates if the codes are exact
    assert error <= bound * 1.2 + rounding


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_matrix_with_non_finite_or_huge_values_is_not_quantized(
    native: NativeOps, dtype: torch.dtype, bad: float
) -> None:
    weight = heavy_tailed(50, 512).to(dtype)
    weight[49, 3] = bad
    matrix = native.matrix(weight, QUANT_FORMATS["q4k"])
    assert matrix.number is None
    result = native.embedding(matrix, torch.arange(50, dtype=torch.int32))
    assert torch.equal(result[:49], weight[:49].bfloat16().float())
    assert not result[49, 3].isfinite() or result[49, 3] > 1e5


def test_product_of_natively_quantized_weights_is_accurate(native: NativeOps) -> None:
    weight, x = heavy_tailed(40, 512).bfloat16(), torch.randn(7, 512)
    product = native.linear([native.matrix(weight, QUANT_FORMATS["q6k"])], None)(x)
    exact = x @ expected(weight, "q6k").T
    assert ((product - exact).square().mean().sqrt() / exact.square().mean().sqrt()) < 0.01
