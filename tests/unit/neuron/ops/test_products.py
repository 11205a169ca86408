"""Products with packed weights of every format: accuracy, and rows that do not depend on the batch."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from helexa.neuron.ops.kernel_header import MIXED
from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.weights.quantized_matrix import GroupScale, GroupwiseTensor, Weight
from neuron.ops import float64, random_weights
from neuron.ops.conftest import THREADS

ROWS = (1, 2, 3, 5, 6, 7, 8, 9, 14, 16, 17, 33, 86, 250, 513)  # around the sizes of panels and of the rows of an item
CASES = [
    (name, outputs, columns)
    for name in random_weights.ALL
    for outputs, columns in [
        (100, 2 * random_weights.STRETCH),
        (16, random_weights.STRETCH),
        (1, random_weights.step(name)),
        (33, 17 * 32 if random_weights.step(name) <= 32 else 3 * random_weights.STRETCH),  # over 16 groups
    ]
]


def activations(rows: int, columns: int) -> Tensor:
    """Random rows with outliers whose upper bytes have few bits, followed by rows that are hard to round."""
    x = torch.randn(rows, columns) * (1 + 7 * (torch.arange(columns) % 64 == 5))
    hard = [
        torch.zeros(columns),
        torch.full((columns,), -0.0),
        torch.randn(columns) + 1000.0 * (torch.arange(columns) % 32 == 5),  # an outlier in every group
        torch.randn(columns) * 1e30,
        torch.randn(columns) * 1e-30,
        torch.full((columns,), 1e-40),  # the inverse of the scale overflows float32
        torch.where(torch.arange(columns) % 64 < 32, 0.0, 1.0),  # every other group is zero
        torch.linspace(-1, 1, columns),
        torch.where(
            torch.arange(columns) % 32 == 0, 127.0, torch.arange(columns) % 32 - 15.5
        ),  # halves, which round to even
        torch.where(
            torch.arange(columns) % 32 == 0, 32639.0, torch.arange(columns) % 32 * 256 - 128.0
        ),  # extreme low bytes
        torch.where(torch.arange(columns) % 32 == 0, -32639.0, torch.arange(columns) % 32 - 15.5),
        torch.full((columns,), 1.0),  # the largest possible integer sums
    ]
    for row, values in enumerate(hard[:rows]):
        x[-1 - row] = values
    return x


def near(actual: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None, bits: int = MIXED) -> None:
    """Assert that a product is within the error bounds of its number format."""
    expected = float64.product(x, weight, bits)
    shift = torch.zeros(()) if bias is None else bias.double()
    tolerance = expected.tolerance + float64.EPSILON * (expected.exact + shift).abs()
    assert actual.isfinite().all()
    assert ((actual - (expected.exact + shift)).abs() <= tolerance).all()
    assert ((actual - (expected.unrounded + shift)).abs() <= expected.rounding + tolerance).all()


@pytest.mark.parametrize("bits", [16, 8, MIXED])
@pytest.mark.parametrize(("name", "outputs", "columns"), CASES)
def test_native_product_is_exact_except_for_rounded_activations(
    library: KernelLibrary, name: str, outputs: int, columns: int, bits: int
) -> None:
    native = NativeOps(library, THREADS, x_bits=bits)
    weight, x = random_weights.make(name, outputs, columns), activations(ROWS[-1], columns)
    near(native.linear([native.matrix(weight)], None)(x), x, weight, bits=bits)


@pytest.mark.parametrize("bits", [16, 8, MIXED])
@pytest.mark.parametrize(("name", "outputs", "columns"), CASES)
def test_row_of_a_product_does_not_depend_on_the_number_of_rows(
    library: KernelLibrary, name: str, outputs: int, columns: int, bits: int
) -> None:
    native = NativeOps(library, THREADS, x_bits=bits)
    weight, x = random_weights.make(name, outputs, columns), activations(ROWS[-1], columns)
    linear = native.linear([native.matrix(weight)], torch.randn(outputs))
    together = linear(x)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), together[:rows])
    for first, end in pairwise((0, 1, 240, 247, 505, 513)):
        assert torch.equal(linear(x[first:end]), together[first:end])


@pytest.mark.parametrize("bits", [16, 8, MIXED])
@pytest.mark.parametrize("name", random_weights.ALL)
def test_non_finite_activations_give_non_finite_results(library: KernelLibrary, name: str, bits: int) -> None:
    native = NativeOps(library, THREADS, x_bits=bits)
    x = torch.randn(7, 256)
    x[1, 100], x[3, 7], x[4, 255] = float("nan"), float("inf"), -float("inf")
    out = native.linear([native.matrix(random_weights.make(name, 40, 256))], None)(x)
    assert out.isfinite().all(1).tolist() == [True, False, True, False, False, True, True]
    assert not out[1].isfinite().any()


@pytest.mark.parametrize("rows", [1, 5, 260])
def test_product_with_matrices_of_mixed_formats_concatenates_their_results(native: NativeOps, rows: int) -> None:
    sizes = {"Q4_K": 48, "bfloat16": 20, "Q6_K": 33, "Q8_0": 1, "Q5_1": 64}
    weights = [random_weights.make(name, outputs, 512) for name, outputs in sizes.items()]
    bias, x = torch.randn(sum(sizes.values())), activations(rows, 512)
    matrices = [native.matrix(weight) for weight in weights]
    plain, biased = (native.linear(matrices, b)(x).split(list(sizes.values()), 1) for b in (None, bias))
    for weight, without, shifted, shift in zip(weights, plain, biased, bias.split(list(sizes.values())), strict=True):
        near(without, x, weight)
        near(shifted, x, weight, shift)


@pytest.mark.parametrize("name", random_weights.ALL)
def test_product_of_no_rows_is_empty(native: NativeOps, name: str) -> None:
    weight = random_weights.make(name, 16, 256)
    assert native.linear([native.matrix(weight)], None)(torch.empty(0, 256)).shape == (0, 16)


@pytest.mark.parametrize("name", random_weights.ALL)
def test_change_of_one_input_column_changes_only_its_term_of_the_product(native: NativeOps, name: str) -> None:
    weight = random_weights.make(name, 16, 256)
    x = torch.cat((torch.eye(256)[-1:], torch.randn(1, 256) * (torch.arange(256) < 255)))
    twins = native.linear([native.matrix(weight)], None)(x)[:, [-4, -3]]
    assert twins[0, 0] != twins[0, 1]
    assert twins[1, 0] == twins[1, 1]


@pytest.mark.parametrize(("name", "outputs", "columns"), CASES)
def test_embedding_returns_the_rows_of_the_packed_matrix(
    native: NativeOps, name: str, outputs: int, columns: int
) -> None:
    """The embedding reads the codes, scales and minimums of every lane."""
    weight = random_weights.make(name, outputs, columns)
    tokens = torch.cat((torch.randperm(outputs), torch.tensor([0, outputs - 1, 0]))).int()
    matrix = native.matrix(weight)
    rows = native.embedding(matrix, tokens)
    assert torch.equal(rows.double(), random_weights.plain(weight)[tokens])
    assert torch.equal(native.embedding(matrix, tokens, 25.25), rows * 25.25)


def test_weights_in_unsupported_formats_are_stored_as_bfloat16(native: NativeOps) -> None:
    known = random_weights.make("Q4_0", 20, 96)
    assert isinstance(known, GroupwiseTensor)
    odd = replace(known, zero=7)
    packed = native.matrix(odd)
    assert packed.number is None
    tokens = torch.arange(20, dtype=torch.int32)
    rows = odd.dequantize(torch.bfloat16).float()
    assert torch.equal(native.embedding(packed, tokens), rows)
    assert torch.equal(native.embedding(packed, tokens, 25.25), rows * 25.25)


def test_float32_scales_of_a_quantized_weight_become_float16_if_accurate_enough(native: NativeOps) -> None:
    known = random_weights.make("Q8_0", 20, 96)
    assert isinstance(known, GroupwiseTensor)
    unit = known.scale.unit.float()
    assert native.matrix(replace(known, scale=GroupScale(unit))).number == native.matrix(known).number
    for factor, quantized in [(1 + 2.0**-15, True), (1e6, False), (1e-6, False)]:
        weight = replace(known, scale=GroupScale(unit.abs().clamp(min=0.5) * factor))
        matrix = native.matrix(weight)
        assert (matrix.number is not None) == quantized
        rows, exact = native.embedding(matrix, torch.arange(20, dtype=torch.int32)), weight.dequantize()
        torch.testing.assert_close(rows, exact, rtol=2.0**-11 if quantized else 2.0**-8, atol=0)


def test_weights_whose_scales_are_powers_of_two_get_the_layout_of_mxfp4(native: NativeOps) -> None:
    """All experts of a layer must have the same packed layout."""
    weight = random_weights.make("IQ4_NL", 16, 64)
    assert isinstance(weight, GroupwiseTensor)
    for low, dtype in [(-20, torch.float16), (-20, torch.float32), (-120, torch.float32)]:
        unit = torch.linspace(low, 0, 32).round().exp2().view(16, 2).to(dtype)
        matrix = native.matrix(replace(weight, scale=GroupScale(unit)))
        assert matrix.number == native.matrix(random_weights.make("MXFP4", 16, 64)).number


@pytest.mark.parametrize("name", ["Q4_K", "Q2_K", "Q6_K", "Q3_K", "IQ4_XS"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_signed_and_unsigned_scale_codes_are_read_with_their_type(
    native: NativeOps, name: str, dtype: torch.dtype
) -> None:
    weight = random_weights.make(name, 16, 512)
    assert isinstance(weight, GroupwiseTensor)
    assert weight.scale.codes is not None
    kernels_type = torch.uint8 if name == "Q4_K" else torch.int8
    for most, may_be_packed in [(127, True), (255, dtype == kernels_type)]:
        codes = torch.randint(0, most + 1, weight.scale.codes.shape).to(torch.uint8).view(dtype)
        changed = replace(weight, scale=replace(weight.scale, codes=codes))
        matrix = native.matrix(changed)
        assert (matrix.number is not None) == may_be_packed
        expected = changed.dequantize(torch.float32 if may_be_packed else torch.bfloat16).float()
        assert torch.equal(native.embedding(matrix, torch.arange(16, dtype=torch.int32)), expected)


def test_reported_bytes_per_step_equal_the_size_of_the_packed_matrix(native: NativeOps) -> None:
    weight = random_weights.make("Q4_0", 64, 512)
    native.linear([native.matrix(weight)], None)
    assert native.step_bytes == 64 * 512 // 32 * 18
