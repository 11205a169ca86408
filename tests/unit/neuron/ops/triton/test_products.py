"""Products with packed quantized matrices, in every kernel, compared with float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helexa.neuron.ops.linear_and_norm_operators import LinearOp
from helexa.neuron.ops.triton.gemm import multiply_tiles, tiles
from helexa.neuron.ops.triton.gpu_ops import GpuOps
from helexa.neuron.ops.triton.launch_and_graphs import GpuProperties
from helexa.neuron.ops.triton.linear import PackedLinear, kernel_for
from helexa.neuron.ops.triton.packed_weights import PackedMatrix, pack
from helexa.neuron.weights.quantization_formats import QUANT_FORMATS
from helexa.neuron.weights.quantize import quantize
from helexa.neuron.weights.quantized_matrix import GroupScale, GroupwiseTensor
from neuron.ops import random_weights

CPU = torch.device("cpu")
EPSILON = 2.0**-24
SCRATCH = torch.zeros(4 * 3 * 256, dtype=torch.uint8)  # three rows
CARD = GpuProperties.from_device(CPU)


@pytest.fixture
def ops() -> GpuOps:
    torch.manual_seed(0)
    return GpuOps(CPU, torch.float32)


def packed(name: str, outputs: int, columns: int) -> PackedMatrix:
    weight = random_weights.make(name, outputs, columns)
    assert isinstance(weight, GroupwiseTensor)
    matrix = pack(weight)
    assert matrix is not None
    return matrix


def grouped(bits: int, group: int, columns: int, *, minimum: bool) -> GroupwiseTensor:
    """A random matrix in a format that no GGUF file has."""
    codes = torch.randint(0, 1 << bits, (6, columns), dtype=torch.uint8)
    scale, low = (GroupScale(torch.randn(6, columns // group).half()) for _ in range(2))
    return GroupwiseTensor(codes, scale, low if minimum else None, 0 if minimum else 1 << bits - 1, bits, group)


def product(matrix: PackedMatrix, bias: Tensor | None = None) -> LinearOp:
    return PackedLinear([matrix], bias, SCRATCH, CARD)


def tiled(x: Tensor, matrix: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """Multiply with the tile kernel in float32, using the tile sizes chosen for 16-bit types."""
    out = torch.empty(x.shape[0], matrix.shape[0])
    multiply_tiles(x, matrix, bias, out, tiles(x.shape[0], matrix, torch.float16, CARD))
    return out


def near(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Assert that a float32 product is within the error of summation in any order."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias)
    # Minimums are summed separately, so a term can be as large as its row's largest weight.
    largest = weight.double().abs().amax(1, keepdim=True).expand_as(weight)
    terms = x.double().abs() @ largest.T + (0 if bias is None else bias.abs())
    assert ((actual - exact).abs() <= 16 * EPSILON * terms + 1e-30).all()


@pytest.mark.parametrize("name", random_weights.FORMATS)
def test_packed_codes_are_exact_and_scales_rounded_to_float16(ops: GpuOps, name: str) -> None:
    weight = random_weights.make(name, 9, 256)
    matrix = ops.matrix(weight)
    assert isinstance(matrix, PackedMatrix)
    assert isinstance(weight, GroupwiseTensor)
    one_level = replace(weight, minimum=None, zero=0, codes=torch.ones_like(weight.codes), table=None)
    scale = one_level.dequantize().abs()
    low = 0 if weight.minimum is None else replace(one_level, scale=weight.minimum).dequantize().abs()
    exact = weight.dequantize()
    rounding = 0.0 if weight.scale.codes is None else 2.0**-11 * ((exact.abs() + low) + low) + 2.0**-14 * scale.amax()
    assert ((ops.dense(matrix) - exact).abs() <= rounding).all()


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("name", random_weights.FORMATS)
def test_triton_product_matches_float64(ops: GpuOps, name: str, rows: int) -> None:
    matrix, x, bias = packed(name, 3, 256), torch.randn(rows, 256), torch.randn(3)
    near(tiled(x, matrix, bias) if rows == 3 else product(matrix, bias)(x), x, ops.dense(matrix), bias)


@pytest.mark.parametrize("rows", [17, 70])
def test_product_with_larger_tiles_matches_float64(ops: GpuOps, rows: int) -> None:
    matrix, x, bias = packed("Q4_K", 130, 256), torch.randn(rows, 256), torch.randn(130)
    near(tiled(x, matrix, bias), x, ops.dense(matrix), bias)


@pytest.mark.parametrize("rows", [2, 20])
def test_product_split_over_columns_sums_its_parts(ops: GpuOps, rows: int) -> None:
    matrix = pack(grouped(4, 32, 1568, minimum=True))
    assert matrix is not None
    assert tiles(rows, matrix, torch.float16, CARD).splits > 1
    x, bias = torch.randn(rows, 1568), torch.randn(6)
    near(tiled(x, matrix, bias), x, ops.dense(matrix), bias)


@pytest.mark.parametrize(
    ("bits", "group", "columns", "minimum"),
    [
        (4, 64, 192, True),
        (4, 128, 384, False),
        (4, 256, 512, True),  # more than kernels support
        (4, 96, 96, True),
        (8, 64, 64, False),
        (8, 16, 48, True),
        (8, 128, 640, True),
        (4, 16, 80, True),  # rows of half a chunk
        (6, 32, 32, False),
        (8, 32, 1120, True),  # some threads have no column left
    ],
)
def test_products_with_all_group_sizes_and_row_lengths_match_the_dequantized_matrix(
    ops: GpuOps, bits: int, group: int, columns: int, minimum: bool
) -> None:
    weight = grouped(bits, group, columns, minimum=minimum)
    matrix = pack(weight)
    assert matrix is not None
    torch.testing.assert_close(ops.dense(matrix), weight.dequantize(), rtol=2**-10, atol=2**-10)
    x = torch.randn(3, columns)
    near(product(matrix)(x[:1]), x[:1], ops.dense(matrix))
    near(tiled(x, matrix), x, ops.dense(matrix))


def test_weights_in_unsupported_formats_are_not_packed(ops: GpuOps) -> None:
    for weight in (grouped(4, 8, 64, minimum=True), grouped(8, 16, 24 * 16, minimum=True).rows(torch.arange(6))):
        matrix = ops.matrix(weight)
        assert isinstance(matrix, Tensor) == (weight.group_size == 8)
    x = torch.randn(2, 64)
    weight = grouped(4, 8, 64, minimum=True)
    torch.testing.assert_close(ops.linear([ops.matrix(weight)], None)(x), x @ weight.dequantize().T)


@pytest.mark.parametrize("rows", [1, 2, 17])
def test_product_in_float16_is_within_rounding(rows: int) -> None:
    torch.manual_seed(0)
    ops = GpuOps(CPU, torch.float16)
    for name in ("Q4_K", "Q6_K", "IQ4_NL"):
        matrix, x = packed(name, 3, 256), torch.randn(rows, 256).half()
        result = PackedLinear([matrix], None, SCRATCH, CARD)(x)
        assert result.dtype == torch.float16
        weight = ops.dense(matrix)
        exact, terms = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
        assert ((result - exact).abs() <= 2**-11 * (exact.abs() + terms) + 1e-6).all()


@pytest.mark.parametrize(("first", "rows"), [(2, 16), (17, 64), (65, 130)])
def test_row_of_a_product_does_not_depend_on_other_rows(ops: GpuOps, first: int, rows: int) -> None:
    matrix, x = packed("Q4_K", 5, 256), torch.randn(rows, 256)
    together = tiled(x, matrix)
    assert torch.equal(tiled(x[:first], matrix), together[:first])
    assert torch.equal(tiled(x[rows - first :], matrix), together[rows - first :])


def test_rows_of_a_small_batch_equal_single_row_products(ops: GpuOps) -> None:
    linear, x = product(packed("Q8_0", 3, 256)), torch.randn(3, 256)
    assert torch.equal(linear(x), torch.cat([linear(row[None]) for row in x]))


@pytest.mark.filterwarnings("ignore:invalid value")  # from numpy, in the interpreter
@pytest.mark.parametrize("rows", [4, 9])
def test_non_finite_activations_affect_only_their_row(ops: GpuOps, rows: int) -> None:
    x = torch.randn(rows, 256)
    x[1, 100], x[2, 255] = float("nan"), float("inf")
    result = product(packed("Q4_K", 5, 256))(x).isfinite()
    assert result.all(1).tolist() == [row not in (1, 2) for row in range(rows)]
    result = tiled(x, packed("Q4_K", 5, 256)).isfinite()
    assert result.all(1).tolist() == [row not in (1, 2) for row in range(rows)]


def test_product_of_large_values_does_not_overflow(ops: GpuOps) -> None:
    matrix, x = packed("Q8_0", 5, 256), torch.randn(2, 256) * 1e18
    near(product(matrix)(x[:1]), x[:1], ops.dense(matrix))
    near(tiled(x, matrix), x, ops.dense(matrix))


@pytest.mark.parametrize("rows", [1, 9])
def test_product_with_matrices_of_mixed_formats_concatenates_their_results(ops: GpuOps, rows: int) -> None:
    names = {"Q4_K": 4, "Q4_1": 1, "Q6_K": 3, "Q8_0": 4, random_weights.PLAIN: 3}
    for chosen in (["Q4_K", "Q4_1"], ["Q4_K", "Q6_K", "Q8_0"], list(names)):
        weights = [random_weights.make(name, names[name], 256) for name in chosen]
        matrices = [ops.matrix(weight) for weight in weights]
        bias, x = torch.randn(sum(names[name] for name in chosen)), torch.randn(rows, 256)
        plain = torch.cat([ops.dense(matrix) for matrix in matrices])
        near(ops.linear(matrices, bias)(x), x, plain, bias)
        gated = ops.linear(matrices, None, "silu")(torch.cat((x, x), 1))
        near(gated, ops.gate_mul(torch.cat((x, x), 1), "silu"), plain)


def test_product_of_no_rows_is_empty(ops: GpuOps) -> None:
    assert product(packed("Q4_K", 5, 256))(torch.empty(0, 256)).shape == (0, 5)


@pytest.mark.parametrize("name", random_weights.FORMATS)
def test_embedding_returns_the_rows_of_the_packed_matrix(ops: GpuOps, name: str) -> None:
    matrix, tokens = packed(name, 9, 256), torch.tensor([8, 0, 3, 3])
    result = ops.embedding(matrix, tokens, 3.0)
    assert torch.equal(result, ops.dense(matrix)[tokens] * 3.0)
    assert ops.embedding(matrix, tokens[:0]).shape == (0, 256)


@pytest.mark.parametrize("name", QUANT_FORMATS)
def test_unquantized_matrices_are_quantized_at_load_to_the_requested_format(ops: GpuOps, name: str) -> None:
    weight = torch.randn(8, 256).bfloat16()
    matrix = ops.matrix(weight, QUANT_FORMATS[name])
    assert isinstance(matrix, PackedMatrix)
    expected = quantize(weight, QUANT_FORMATS[name])
    assert expected is not None
    torch.testing.assert_close(ops.dense(matrix), expected.dequantize(), rtol=2**-9, atol=2**-9)
    weight[3, 3] = float("nan")
    assert isinstance(ops.matrix(weight, QUANT_FORMATS[name]), Tensor)


def test_reported_bytes_per_step_equal_the_size_of_the_matrices(ops: GpuOps) -> None:
    ops.linear([packed("Q4_0", 8, 256), packed("Q4_0", 4, 256)], None)
    assert ops.step_bytes == 12 * 256 * (4 + 16 / 32) / 8
    ops.linear([ops.matrix(torch.randn(4, 8))], None)
    assert ops.step_bytes == 12 * 256 * (4 + 16 / 32) / 8 + 4 * 8 * 4


def test_product_kernel_depends_on_the_number_of_rows_and_the_gpu() -> None:
    old = GpuProperties((7, 5), 64 << 10, 40)
    assert [kernel_for(rows, torch.float16, CARD) for rows in (1, 2, 512, 513)] == ["rows", "tiles", "tiles", "plain"]
    assert [kernel_for(rows, torch.float16, old) for rows in (1, 8, 9)] == ["rows", "rows", "plain"]
    assert [kernel_for(rows, torch.float32, CARD) for rows in (1, 8, 9)] == ["rows", "rows", "plain"]
